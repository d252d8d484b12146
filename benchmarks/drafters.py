"""DSpark, DFlash and EAGLE-3 after the same training on the same captured states: `make bench-drafters`.

    quickstart conversations --capture, once--> cache --train--> dspark, dflash, eagle3 --evaluate, side by side-->
    acceptance length by domain with intervals (table 1 of the paper in miniature), acceptance by position (figure 2)

Every stage is a command of the project in a process of its own. A later call with the same arguments uses what a stage
left, and goes on where a training or the evaluation was broken off. Prints tables and, as its last line, one JSON
object; `--record` writes docs/results.md from it, when all is measured.
"""

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.results_record import document, findings, machine
from dspark.config import Settings
from dspark.evaluation.pictures import well_measured
from dspark.evaluation.summary import ENDS
from jobs.config import dump_settings, load_settings
from jobs.tables import print_comparison

PRESET = Path("platform/presets/smollm2_135m.yaml")
RECORD = Path("docs/results.md")
KINDS = ("dspark", "dflash", "eagle3")
# K and gamma as published. Sixteen answers are decoded together: a round keeps as many tokens at any batch.
COMMON = {
    "drafter": {"block": 7},
    "loss": {"gamma": 4.0},
    "train": {"log_every": 10, "checkpoint_every": 200, "keep_last": 1},
    "evaluate": {"max_new_tokens": 64, "batch": [16]},
    "tracking": {"register_model": False},
    "data": {"source": "cache"},
}
# DFlash has neither Markov head nor confidence head, and learns from cross-entropy alone.
DFLASH: dict[str, dict[str, Any]] = {
    "drafter": {"markov_rank": 0, "confidence": False, "confidence_with_markov": False},
    "loss": {"ce": 1.0, "l1": 0.0, "confidence": 0.0},
}
# EAGLE-3 has one layer and chains as many steps in training as it proposes in decoding.
EAGLE3_DRAFTER = ("block", "taps", "family", "vocab")
# Sections of the settings that a capture and a training do not read: other values there leave what they made.
NOT_CAPTURED = ("train", "loss", "eagle3", "evaluate")
NOT_TRAINED = ("evaluate",)
# What the folder of a run holds once it can go on; a capture is short and begins again.
RESUMABLE = {kind: "run.json" for kind in KINDS} | {"evaluate": "evaluation.json"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=600, help="conversations that are captured and trained on")
    parser.add_argument("--steps", type=int, default=1200, help="optimizer steps of 2 rows, of each drafter")
    parser.add_argument(
        "--prompts", type=int, default=48, help="held-out prompts at temperature 0, a quarter also at 1"
    )
    parser.add_argument("--benchmarks", type=Path, help="folder of NAME.jsonl, measured besides")
    parser.add_argument("--benchmark-prompts", type=int, default=8, help="of each benchmark")
    parser.add_argument("--init", choices=("random", "target"), default="random",
                        help="target: layers and Markov head of DSpark and DFlash from the target; EAGLE-3 has no such "
                        "start")  # fmt: skip
    parser.add_argument("--cores", type=int, default=2, help="threads of a trainer, and evaluators")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench-drafters"), help="where everything goes")
    parser.add_argument("--quick", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD}")
    asked = parser.parse_args()
    if asked.quick:
        asked.rows, asked.steps, asked.prompts, asked.benchmark_prompts = 24, 12, 6, 1
    return asked


def presets(asked: argparse.Namespace) -> dict[str, Settings]:
    """The settings of each drafter, checked, and written as a preset into the folder."""
    asked.folder.mkdir(parents=True, exist_ok=True)
    base = load_settings(PRESET, [])
    data = asked.folder.absolute() / "train.jsonl"
    data.write_text("".join(chosen(base.data.conversations, asked.rows)))
    values = yaml.safe_load(dump_settings(base))
    batch = base.train.global_batch
    for part in (COMMON, {
        "drafter": {"init": asked.init},
        "data": {"conversations": str(data)},
        # No target runs beside a trainer, so that it has all cores.
        "train": {
            "threads": asked.cores, "max_steps": asked.steps, "epochs": math.ceil(asked.steps * batch / asked.rows)
        },
        "cache": {"folder": str(asked.folder.absolute() / "cache")},
        "evaluate": {
            "actors": asked.cores, "prompts_t0": asked.prompts, "prompts_t1": asked.prompts // 4,
            "benchmark_prompts": asked.benchmark_prompts,
        }
        | ({"benchmarks": str(asked.benchmarks.absolute())} if asked.benchmarks else {})
        | ({"max_new_tokens": 12} if asked.quick else {}),
    }):  # fmt: skip
        values = merged(values, part)
    found = {}
    for kind in KINDS:
        own = {**of_kind(values, kind), "name": kind, "output": str(asked.folder.absolute() / kind)}
        path = asked.folder / f"{kind}.yaml"
        path.write_text(yaml.safe_dump(own, sort_keys=False))
        found[kind] = load_settings(path, [])
    return found


def chosen(conversations: Path, count: int) -> list[str]:
    """Evenly spaced lines: the domains take turns, and the templates of the file are spread over it."""
    lines = conversations.read_text(encoding="utf-8").splitlines(keepends=True)
    if count > len(lines):
        raise SystemExit(f"--rows {count}: {conversations} has {len(lines)}")
    return [lines[i * len(lines) // count] for i in range(count)]


def merged(values: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """The settings with single keys of sections replaced."""
    return values | {section: {**values[section], **keys} for section, keys in part.items()}


def of_kind(values: dict[str, Any], kind: str) -> dict[str, Any]:
    if kind == "dspark":
        return values
    if kind == "dflash":
        return merged(values, DFLASH)
    own = {key: value for key, value in values.items() if key != "loss"}
    block = values["drafter"]["block"]
    return own | {
        "drafter": {"kind": "eagle3"} | {key: values["drafter"][key] for key in EAGLE3_DRAFTER},
        "eagle3": {"ttt_length": block},
        "train": {key: value for key, value in values["train"].items() if key != "anchors"},
    }


def stage(folder: Path, name: str, command: list[str], without: Sequence[str]) -> float | None:
    """Runs a command of the project, unless its mark says that it is done.

    Args:
        without: sections of the settings that this stage does not read.

    Returns:
        The seconds that it took, now or then; None where it was broken off and went on later.
    """
    mark, begun = folder / f"{name}.done", folder / f"{name}.begun"
    asked = json.dumps([command, inputs(folder, without)])
    if mark.is_file():
        before = json.loads(mark.read_text())
        if before["asked"] == asked:
            print(f"{name}: done before", flush=True)
            return None if before["seconds"] is None else float(before["seconds"])
    run = folder / name / "latest"
    known = begun.is_file() and begun.read_text() == asked
    goes_on = known and name in RESUMABLE and (run / RESUMABLE[name]).is_file()
    if not goes_on:
        shutil.rmtree(folder / name, ignore_errors=True)
        begun.write_text(asked)
    command = [*command, "--resume", str(run.resolve())] if goes_on else command
    print(f"{name}: {' '.join(command)}", flush=True)
    since = time.monotonic()
    code = subprocess.run([sys.executable, "-m", *command], check=False).returncode
    if code:
        raise SystemExit(f"{name} failed with exit code {code}")
    seconds = None if goes_on else time.monotonic() - since
    mark.write_text(json.dumps({"asked": asked, "seconds": seconds}))
    return seconds


def inputs(folder: Path, without: Sequence[str]) -> list[Any]:
    """What decides a stage's result: the presets but for the sections it does not read, and the conversations."""
    presets = [yaml.safe_load((folder / f"{kind}.yaml").read_text()) for kind in KINDS]
    kept = [{key: value for key, value in preset.items() if key not in without} for preset in presets]
    return [*kept, (folder / "train.jsonl").read_text()]


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """All stages; what `evaluate` found, with what it was made of."""
    folder = asked.folder
    settings = presets(asked)
    seconds = {"cache": stage(folder, "cache", ["jobs.capture", str(folder / "dspark.yaml")], NOT_CAPTURED)}
    names = folder / "drafters"
    names.mkdir(exist_ok=True)
    for kind in KINDS:
        seconds[kind] = stage(folder, kind, ["jobs.train", str(folder / f"{kind}.yaml")], NOT_TRAINED)
        (names / kind).unlink(missing_ok=True)
        (names / kind).symlink_to((folder / kind / "latest" / "drafter").resolve())
    output = folder.absolute() / "evaluate"
    command = ["jobs.evaluate", str(folder / "dspark.yaml"), *(str(names / kind) for kind in KINDS), f"output={output}"]
    seconds["evaluate"] = stage(folder, "evaluate", command, ())
    result = json.loads((output / "latest" / "result.json").read_text())
    own = settings["dspark"]
    samples = asked.steps * own.train.global_batch
    return {
        "settings": {"rows": asked.rows, "steps": asked.steps, "samples": samples, "init": asked.init,
                     "block": own.drafter.block, "max_new_tokens": own.evaluate.max_new_tokens},
        "machine": machine(),
        "seconds": {name: None if value is None else round(value, 1) for name, value in seconds.items()},
        "comparison": result["comparison"],
        "positions": {section: positions(result, section) for section in result["comparison"]},
        "identical": {kind: identical(result["drafters"][kind]) for kind in KINDS},
        "training": {kind: training(folder / kind / "latest") for kind in KINDS},
    }  # fmt: skip


def positions(result: dict[str, Any], section: str) -> dict[str, list[float | None]]:
    """Conditional acceptance by slot at temperature 0, of all prompts of a section; None where few rounds got to."""
    return {kind: well_measured(result["drafters"][kind][section]["t0"]["overall"]) for kind in KINDS}


def identical(drafter: dict[str, Any]) -> list[int]:
    """[equal, compared] over held-out prompts and benchmarks."""
    counts = [drafter[name]["t0"]["overall"]["identical"] for name in ("held_out", "benchmarks") if drafter[name]]
    return [sum(pair[place] for pair in counts) for place in (0, 1)]


def training(run: Path) -> dict[str, float]:
    """The median of the steps' seconds, which no wait of the whole job moves, and the mean loss of the last records."""
    history = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    seconds = statistics.median(record["seconds_total"] for record in history)
    return {"step_seconds": seconds, "loss": statistics.fmean(record["loss"] for record in history[-ENDS:])}


def show(console: Console, report: dict[str, Any]) -> None:
    """Table 1 and figure 2 in miniature, and whether their order came out."""
    print_comparison(console, report["comparison"])
    for section, curves in report["positions"].items():
        slots = max(map(len, curves.values()))
        title = f"conditional acceptance by slot, {section.replace('_', '-')}, temperature 0"
        table = Table("drafter", *(f"slot {k}" for k in range(slots)), title=title, title_justify="left")
        for kind, rates in curves.items():
            table.add_row(kind, *("-" if rate is None else f"{rate:.1%}" for rate in rates))
        console.print(table)
    for line in findings(report):
        console.print(line)


def command_of(given: list[str]) -> str:
    """The call without the places of this machine."""
    shown = ["FOLDER" if before in ("--benchmarks", "--folder") else text
             for before, text in zip(["", *given], given, strict=False)]  # fmt: skip
    return f"make bench-drafters ARGS='{' '.join(shown)}'" if shown else "make bench-drafters"


def main() -> int:
    asked = arguments()
    report = measure(asked)
    report["command"] = command_of(sys.argv[1:])
    plots = asked.folder / "evaluate" / "latest" / "plots"
    pictures = {section: plots / f"positions{'' if section == 'held_out' else '_' + section}.png"
                for section in report["positions"]}  # fmt: skip
    show(Console(), report)
    for path in pictures.values():
        print(path)
    if asked.record:
        for section, path in pictures.items():
            if path.is_file():
                shutil.copy(path, RECORD.parent / f"results-{section}.png")
        RECORD.write_text(document(report))
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
