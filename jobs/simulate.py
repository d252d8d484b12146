"""`dspark simulate`: tokens per second at any load, replayed from the rounds and step rates of a calibration.

rounds.jsonl, the half that nothing was fitted to ─┐
calibration.json, temperatures and step rates ─────┴─> each policy at each load -> table, simulation.json, plots
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dspark.decoding.calibration import VerifiedRound, confidences
from dspark.decoding.calibration_file import Calibration, load_calibration
from dspark.decoding.schedule import StepRates
from dspark.decoding.simulate import Replayed, policies, replay
from dspark.errors import InputError
from dspark.evaluation.calibration_plots import throughput_curves, verified_curves
from dspark.evaluation.figures import LIGHT
from jobs.calibrate import CALIBRATION
from jobs.calibrating import ROUNDS, read_rounds

SIMULATION = "simulation.json"


def simulate(
    run: Path, calibration: Path | None, threshold: float, requests: Sequence[int] | None, dry_run: bool
) -> None:
    """Replays the rounds of the calibration in the folder `run` and leaves the results there.

    Args:
        run: folder that `dspark calibrate` made.
        calibration: file with other step rates or temperatures; None: that of the run.
        threshold: of the threshold policy.
        requests: loads; None: powers of two, as far as the step rates reach.
        dry_run: only say what would be replayed.

    Raises:
        InputError: rounds or rates are missing, or a load is beyond the measured rates.
    """
    console = Console()
    recorded = [one for prompt in read_rounds(run / ROUNDS) if prompt.half == "report" for one in prompt.rounds]
    file = calibration or run / CALIBRATION
    found = load_calibration(file)
    if found.rates is None:
        raise InputError(f"{file} holds no step rates: measure them with `dspark calibrate --profile`")
    if not recorded:
        raise InputError(f"{run / ROUNDS} holds no rounds to report on: record more with `dspark calibrate`")
    loads = _loads(requests, found.rates, max(len(one.logits) for one in recorded))
    console.print(f"{len(recorded)} rounds at {', '.join(map(str, loads))} requests, step rates of {file}")
    if dry_run:
        return
    known = _confidences(recorded, found)
    replays = [
        replay(recorded, known, name, choose, load, found.rates)
        for name, choose in policies(found.rates, threshold).items()
        for load in loads
    ]
    _print(console, replays)
    (run / "plots").mkdir(exist_ok=True)
    (run / "plots" / "throughput.png").write_bytes(throughput_curves(replays, LIGHT))
    (run / "plots" / "verified.png").write_bytes(verified_curves(replays, LIGHT))
    values = {"rounds": len(recorded), "threshold": threshold, "replays": [asdict(one) for one in replays]}
    (run / SIMULATION).write_text(json.dumps(values, indent=1) + "\n")
    console.print(str(run / SIMULATION), soft_wrap=True)


def _loads(requests: Sequence[int] | None, rates: StepRates, slots: int) -> list[int]:
    """Loads at which fixed lengths stay within the measured passes: beyond them the rates would be invented."""
    most = rates.tokens[-1] // (slots + 1)
    if requests is None:
        requests = [2**power for power in range(most.bit_length())]
    if not requests or max(requests) > most:
        raise InputError(
            f"{max(requests, default=1)} requests with {slots} drafts each make passes beyond the {rates.tokens[-1]} "
            "tokens up to which step rates were measured: profile again with more calibrate.requests, or simulate fewer"
        )
    return sorted(set(requests))


def _confidences(recorded: Sequence[VerifiedRound], calibration: Calibration) -> list[list[float]]:
    """Probability of each verified draft, given that those before it are accepted."""
    slots = max(len(one.logits) for one in recorded)
    temperatures = calibration.temperatures or (1.0,) * slots
    if len(temperatures) < slots:
        raise InputError(
            f"the calibration holds {len(temperatures)} temperatures, the rounds have {slots} slots: name a "
            "calibration of the same drafter"
        )
    return [confidences(one.logits, temperatures) for one in recorded]


def _print(console: Console, replays: Sequence[Replayed]) -> None:
    table = Table(title="tokens per second of all requests (draft tokens verified per round)", title_justify="left")
    table.add_column("requests", justify="right")
    names = list(dict.fromkeys(one.policy for one in replays))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    found = {(one.policy, one.requests): one for one in replays}
    for load in dict.fromkeys(one.requests for one in replays):
        cells = [found[name, load] for name in names]
        table.add_row(str(load), *(f"{one.tokens_per_second:.1f} ({one.verified:.2f})" for one in cells))
    console.print(table)
    console.print(
        "[dim]A step takes the time of one target pass over all requests, as it was measured; drafting is not in it. "
        "Recorded rounds are dealt to the requests as if they could follow one another in any order."
    )


if __name__ == "__main__":
    from jobs.cli import command_main

    command_main("simulate")
