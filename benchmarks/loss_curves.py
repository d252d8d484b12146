"""Loss curves of the quickstart on one and on two ranks: `make curves`.

    one rank, ZeRO 1 -> losses; the same again -> equal to 1e-6; two ranks and two targets, ZeRO 2 and 3 -> within 2 %

Prints a table and, as its last line, one JSON object; exits with 1 where a curve is too far away.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

PRESET = Path("platform/presets/smollm2_135m.yaml")
TWO = ["train.workers=2", "targets.actors=2"]
# Name, overrides, largest relative difference that is allowed.
RUNS: list[tuple[str, list[str], float]] = [
    ("the same again", [], 1e-6),
    ("two ranks, ZeRO 2", [*TWO, "train.zero_stage=2"], 0.02),
    ("two ranks, ZeRO 3", [*TWO, "train.zero_stage=3"], 0.02),
]


def losses(folder: Path, steps: int, overrides: list[str]) -> list[float]:
    """Trains `steps` steps in a process of its own and returns the loss of each."""
    shortened = [f"train.max_steps={steps}", "train.log_every=1", f"output={folder}", *overrides]
    done = subprocess.run([sys.executable, "-m", "jobs.train", str(PRESET), *shortened], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(overrides)} failed with {done.returncode}:\n{done.stderr[-3000:]}")
    lines = (folder / "latest" / "history.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    console, table = Console(), Table("run", "first loss", "last loss", "largest relative difference", "allowed")
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        base = losses(Path(scratch) / "base", steps, [])
        table.add_row("one rank, ZeRO 1", f"{base[0]:.5f}", f"{base[-1]:.5f}", "", "")
        for number, (name, overrides, allowed) in enumerate(RUNS):
            curve = losses(Path(scratch) / str(number), steps, overrides)
            worst = max(abs(other - one) / abs(one) for one, other in zip(base, curve, strict=True))
            table.add_row(name, f"{curve[0]:.5f}", f"{curve[-1]:.5f}", f"{worst:.1e}", f"{allowed:g}")
            found[name] = {"largest_relative_difference": worst, "allowed": allowed}
    console.print(table)
    print(json.dumps({"steps": steps, "runs": found}))
    return int(any(run["largest_relative_difference"] > run["allowed"] for run in found.values()))


if __name__ == "__main__":
    sys.exit(main())
