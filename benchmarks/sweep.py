"""A sweep over the losses of the quickstart, and its page: `make sweep`.

quickstart conversations --capture, once--> cache --tune, platform/presets/sweeps/loss.yaml--> best.yaml, docs/sweep.md

Both stages are commands of the project in a process of their own, and print their progress. A cache that is complete is
used again. The last line is one JSON object; exits with 1 where the sweep took longer than a quarter of an hour.
"""

import argparse
import csv
import json
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jobs.config import load_settings

PRESET = Path("platform/presets/sweeps/loss.yaml")
PAGE, PICTURES = Path("docs/sweep.md"), ("parallel", "importance", "curves")
LONGEST_S = 900.0
MEANINGS = {
    "parallel": "one line per trial over an axis per setting, coloured by what it reached",
    "importance": "share of the differences that each setting explains",
    "curves": "what each trial reached over its steps",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/sweep"), help="where cache and runs go")
    parser.add_argument("--quick", action="store_true", help="sizes that only show that it runs; writes no page")
    return parser.parse_args()


def quick_settings(folder: Path) -> list[str]:
    """Few rows, in files of their own, for few steps."""
    settings = load_settings(PRESET, [])
    assert settings.data.validation is not None
    changed = []
    for key, source, count in (
        ("data.conversations", settings.data.conversations, 24),
        ("data.validation", settings.data.validation, 6),
    ):
        file = folder.absolute() / f"{key.rpartition('.')[2]}.jsonl"
        file.write_text("".join(source.read_text(encoding="utf-8").splitlines(keepends=True)[:count]))
        changed.append(f"{key}={file}")
    return [*changed, "tune.max_steps=8", "tune.grace=2", "validation.every=2", "tune.trials=3", "tune.confirm=1"]


def stage(name: str, overrides: list[str]) -> float:
    """Runs a command of the project on the preset; the seconds that it took."""
    command = [sys.executable, "-m", f"jobs.{name}", str(PRESET), *overrides]
    print(" ".join(["dspark", name, str(PRESET), *overrides]), flush=True)
    since = time.monotonic()
    code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(f"{name} failed with exit code {code}")
    return time.monotonic() - since


def document(run: Path, seconds: dict[str, float]) -> str:
    """The page: settings, table, what came out, pictures. No number in it is typed."""
    result = json.loads((run / "result.json").read_text())
    rows = list(csv.DictReader((run / "trials.csv").open(encoding="utf-8")))
    settings = load_settings(run / "settings.yaml", [])
    section, best, preset = settings.tune, result["best"], result["preset_mean"]
    keys, metric = list(section.space), result["metric"]
    lines = [
        "# A sweep over the losses of the quickstart",
        "",
        f"Written by `make sweep` from `{PRESET}`: {section.trials} trials of {section.max_steps} steps, "
        f"{section.concurrent} at a time, from one cache. Trial 0 is the preset itself. `{metric}` is measured on rows",
        "that no trial trains; [tune.md](tune.md) says how trials are stopped and how the best one is chosen.",
        "",
        "| trial | seed | " + " | ".join(f"`{key}`" for key in keys) + f" | step | `{metric}` | state |",
        "| ---: | ---: | " + "---: | " * len(keys) + "---: | ---: | --- |",
    ]
    for row in rows:
        value = f"{float(row[metric]):.4f}" if row[metric] else ""
        cells = [row["trial"], row["seed"], *(row.get(key) or "preset" for key in keys), row["step"], value,
                 row["state"]]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    compared = "" if preset is None else f" The preset reached {preset:.4f}."
    found = ", ".join(f"`{key}={json.dumps(value)}`" for key, value in best["values"].items()) or "the preset's own"
    lines += [
        "",
        f"Best: trial {best['trial']} with {found}.",
        f"Its mean over {section.seeds} seeds is {best['mean']:.4f}.{compared}",
        "Few trials, few steps and two seeds: a demonstration, no finding about these settings.",
        "",
        f"Seconds: {seconds['capture']:.0f} to capture the states, {seconds['tune']:.0f} for the sweep. "
        f"Machine: {platform.machine()}, Python {platform.python_version()}.",
        "",
    ]
    for name in drawn(run):
        lines += [f"![{MEANINGS[name]}](sweep-{name}.png)", ""]
    return "\n".join(lines)


def drawn(run: Path) -> list[str]:
    """The pictures that the sweep has; few trials may have no importance."""
    return [name for name in PICTURES if (run / "plots" / f"{name}.png").exists()]


def main() -> int:
    asked = arguments()
    asked.folder.mkdir(parents=True, exist_ok=True)
    more = [f"output={asked.folder}", f"cache.folder={asked.folder / ('cache-quick' if asked.quick else 'cache')}"]
    more += quick_settings(asked.folder) if asked.quick else []
    seconds = {name: stage(name, more) for name in ("capture", "tune")}
    run = (asked.folder / "latest").resolve()
    page = document(run, seconds)
    if not asked.quick:
        PAGE.write_text(page)
        for name in PICTURES:
            PAGE.with_name(f"sweep-{name}.png").unlink(missing_ok=True)
        for name in drawn(run):
            shutil.copy(run / "plots" / f"{name}.png", PAGE.with_name(f"sweep-{name}.png"))
    result: dict[str, Any] = json.loads((run / "result.json").read_text())
    missed = [] if seconds["tune"] <= LONGEST_S else ["seconds"]
    print(json.dumps({"seconds": seconds, "folder": str(run), **result, "missed": missed}))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
