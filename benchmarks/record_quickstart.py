"""Writes `docs/quickstart.md` and its pictures from the newest run: `make demo`, then `make record`."""

import json
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RUN = ROOT / "runs" / "latest"
PICTURES = {"tau.png": "tokens per round that the training batches predict, over the steps"}


def table(part: dict[str, Any]) -> list[str]:
    """A Markdown table of one kind of prompts."""
    lines = [
        "| prompts | n | acceptance length | accepted | plain tok/s | speculative tok/s | speed-up |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for summary in part.values():
        rows = {**summary["by_domain"], "**all**": summary["overall"]}
        for domain, row in rows.items():
            speed = row["tokens_per_second"]
            cells = [
                f"temperature {summary['temperature']:g}, {domain}",
                f"{row['prompts']}",
                f"{row['acceptance_length']:.3f}",
                f"{row['accepted_per_proposed']:.1%}",
                f"{speed['plain']:.1f}",
                f"{speed['speculative']:.1f}",
                f"{row['speedup']:.2f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> int:
    result = json.loads((RUN / "result.json").read_text())
    seconds, greedy = result["seconds"], next(iter(result["held_out"].values()))["overall"]
    share = greedy["time_share"]
    lines = [
        "# What the quickstart gives",
        "",
        "Written by `make demo` and then `make record`; no number here is typed. Acceptance length is tokens kept per",
        "round: accepted drafts plus the target's own token.",
        "",
        *table(result["held_out"]),
        "",
        *(["## Benchmarks", "", *table(result["benchmarks"]), ""] if result["benchmarks"] else []),
        f"Identical to plain decoding at temperature 0: {result['identical'][0]} of {result['identical'][1]}.",
        f"{result['steps']} optimizer steps. Seconds: {seconds['prepare']:.0f} to prepare, {seconds['train']:.0f} to "
        f"train, {seconds['evaluate']:.0f} to evaluate, {seconds['total']:.0f} in all.",
        "Time of speculative decoding: " + ", ".join(f"{name} {value:.0%}" for name, value in share.items()) + ".",
        f"Machine: {platform.machine()}, Python {platform.python_version()}.",
        "",
    ]
    for name, meaning in PICTURES.items():
        if (RUN / "plots" / name).exists():
            shutil.copy(RUN / "plots" / name, ROOT / "docs" / f"quickstart-{name}")
            lines += [f"![{meaning}](quickstart-{name})", ""]
    (ROOT / "docs" / "quickstart.md").write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
