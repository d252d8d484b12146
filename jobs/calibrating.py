"""Rounds and step rates from actors, and what is made of them: temperatures, tables, files, pictures."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.table import Table

from actors.calibrator import CalibrationTask, CalibratorActor, ProfilerActor
from actors.pools import evaluated
from dspark.config import Settings
from dspark.decoding.calibration import (
    Fit,
    Half,
    SlotQuality,
    Verified,
    VerifiedRound,
    fit_temperatures,
    measure,
    verified_rounds,
)
from dspark.decoding.profile import pass_shapes
from dspark.decoding.schedule import StepRates
from dspark.errors import InputError
from dspark.model.config import DSparkConfig
from jobs.progress import stage
from jobs.rows import PromptRows

ROUNDS = "rounds.jsonl"


@dataclass(frozen=True)
class Recorded:
    """The rounds of one prompt, in their order."""

    id: str
    half: Half
    rounds: tuple[VerifiedRound, ...]


@dataclass(frozen=True)
class Calibrated:
    """Temperatures of one half of the prompts, and how good the predictions are on the other half, by slot."""

    fit: Fit
    before: tuple[SlotQuality, ...]
    after: tuple[SlotQuality, ...]


def decode_rounds(settings: Settings, drafter: Path, prompts: PromptRows, console: Console) -> list[Recorded]:
    """Decodes every prompt with all drafted slots verified; sorted, and the same whatever the number of actors."""
    size = settings.calibrate.batch
    rows = [{"id": prompt.id, "ids": ids} for prompt, ids in zip(prompts.prompts, prompts.ids, strict=True)]
    batches = [pa.Table.from_pylist(rows[at : at + size]) for at in range(0, len(rows), size)]
    longest = max(map(len, prompts.ids)) + settings.evaluate.max_new_tokens
    task = CalibrationTask(settings.target, drafter, settings.evaluate, settings.calibrate, longest, settings.seed)
    found: list[Recorded] = []
    with (
        stage(console, "decode", len(rows)) as bar,
        closing(evaluated(CalibratorActor, (task,), batches, settings)) as results,
    ):
        for row in results:
            found.append(_recorded(json.loads(row["result"])))
            bar.update(len(found), f"{sum(len(one.rounds) for one in found)} rounds")
    return sorted(found, key=lambda one: one.id)


def profile_rates(settings: Settings, draft: DSparkConfig, prompts: PromptRows, console: Console) -> StepRates:
    """Target passes per second by tokens in a pass, timed in one actor that has the machine to itself."""
    shapes = pass_shapes(settings.calibrate.requests, draft.block)
    # In the middle of an answer to a prompt of middle length.
    context = int(statistics.median(map(len, prompts.ids))) + settings.evaluate.max_new_tokens // 2
    table = pa.table({"rows": [rows for rows, _ in shapes], "width": [width for _, width in shapes]})
    arguments = (settings.target, settings.evaluate, draft.taps, context, settings.calibrate.repeats)
    with (
        stage(console, "profile", len(shapes)) as bar,
        closing(evaluated(ProfilerActor, arguments, [table], settings)) as results,
    ):
        rows = list(results)
        bar.update(len(rows), f"passes of {rows[0]['tokens']} to {rows[-1]['tokens']} tokens behind {context}")
    return StepRates(tuple(row["tokens"] for row in rows), tuple(row["per_second"] for row in rows))


def calibrate_rounds(settings: Settings, recorded: Sequence[Recorded], block: int) -> Calibrated:
    """Fits on one half of the prompts, measures on the other.

    Raises:
        InputError: a half has fewer rounds than a temperature needs.
    """
    wanted, bins = settings.calibrate.min_rounds, settings.calibrate.bins
    halves = {half: _half(recorded, half, block) for half in ("fit", "report")}
    counts = {half: int(verified.of(0).sum()) for half, verified in halves.items()}
    if min(counts.values()) < wanted:
        raise InputError(
            f"{counts['fit']} rounds to fit temperatures to and {counts['report']} to report on, needed are "
            f"calibrate.min_rounds={wanted} of each: raise evaluate.prompts_t0 or evaluate.max_new_tokens, add prompts "
            "to data.held_out, or set evaluate.benchmarks"
        )
    fit = fit_temperatures(halves["fit"], bins, wanted)
    return Calibrated(
        fit,
        before=measure(halves["report"], (1.0,) * block, bins),
        after=measure(halves["report"], fit.temperatures, bins),
    )


def write_rounds(path: Path, recorded: Sequence[Recorded]) -> None:
    """One prompt a line."""
    path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in recorded))


def read_rounds(path: Path) -> list[Recorded]:
    """What `write_rounds` wrote.

    Raises:
        InputError: there is no such file, or it holds something else.
    """
    try:
        return [_recorded(json.loads(line)) for line in path.read_text().splitlines()]
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}): name the run folder of a `dspark calibrate`, which writes it"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} holds no recorded rounds ({error}): record them with `dspark calibrate`") from error


def calibration_numbers(calibrated: Calibrated) -> dict[str, Any]:
    """Everything about the slots in plain JSON types."""
    fit = calibrated.fit
    return {
        "temperatures": list(fit.temperatures),
        "fit_rounds": list(fit.rounds),
        "fitted": list(fit.fitted),
        "before": [asdict(slot) for slot in calibrated.before],
        "after": [asdict(slot) for slot in calibrated.after],
    }


def calibration_metrics(calibrated: Calibrated) -> dict[str, float]:
    """The same as MLflow metrics, without bins."""
    metrics = {f"temperature_{slot}": value for slot, value in enumerate(calibrated.fit.temperatures)}
    for when, slots in (("before", calibrated.before), ("after", calibrated.after)):
        for slot, quality in enumerate(slots):
            named = {"ece": quality.ece, "brier": quality.brier, "auroc": quality.auroc}
            metrics |= {f"{name}_{when}_{slot}": value for name, value in named.items() if value is not None}
    return metrics


def print_calibration(console: Console, calibrated: Calibrated) -> None:
    """One line per slot, and under the table what was not fitted."""
    table = Table(title="confidence head on prompts that it was not fitted to", title_justify="left")
    for column in ("slot", "T", "rounds", "accepted", "ECE", "Brier", "AUROC"):
        table.add_column(column, justify="right", no_wrap=True)
    fit = calibrated.fit
    for slot, (old, new) in enumerate(zip(calibrated.before, calibrated.after, strict=True)):
        table.add_row(
            str(slot),
            f"{fit.temperatures[slot]:.3f}" + ("" if fit.fitted[slot] else " *"),
            str(new.rounds),
            "-" if new.accepted is None else f"{new.accepted:.1%}",
            *(_change(getattr(old, name), getattr(new, name)) for name in ("ece", "brier", "auroc")),
        )
    console.print(table)
    console.print(
        "[dim]Each number is about the product of the slots up to this one: the probability that all are accepted. "
        "Before and after the temperatures; ECE and Brier score are better when lower, AUROC when higher."
    )
    few = [f"slot {slot} ({fit.rounds[slot]} rounds)" for slot, fitted in enumerate(fit.fitted) if not fitted]
    if few:
        console.print(f"* too few rounds to fit, temperature 1 kept: {', '.join(few)}")


def print_rates(console: Console, rates: StepRates) -> None:
    """The table of passes per second."""
    table = Table("tokens in a pass", "passes per second", "milliseconds", title="target", title_justify="left")
    for tokens, rate in zip(rates.tokens, rates.per_second, strict=True):
        table.add_row(str(tokens), f"{rate:.2f}", f"{1000 / rate:.2f}")
    console.print(table)


def _recorded(row: Mapping[str, Any]) -> Recorded:
    rounds = (VerifiedRound(**{**one, "logits": tuple(one["logits"])}) for one in row["rounds"])
    return Recorded(row["id"], row["half"], tuple(rounds))


def _half(recorded: Iterable[Recorded], half: str, block: int) -> Verified:
    return verified_rounds([one for prompt in recorded if prompt.half == half for one in prompt.rounds], block)


def _change(before: float | None, after: float | None) -> str:
    return "-" if before is None or after is None else f"{before:.4f} → {after:.4f}"
