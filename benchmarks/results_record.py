"""`docs/results.md` from what `benchmarks/drafters.py` measured, and what the numbers say in words."""

import importlib.metadata
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dspark.evaluation.comparison import best_of
from dspark.evaluation.definitions import DEFINITIONS

# The order of the published table.
EXPECTED = ("dspark", "dflash")
_INTRODUCTION = """\
# Three kinds of drafters after the same training

Written by `make bench-drafters` with `--record`; no number here is typed. SmolLM2-135M-Instruct is the target. Its
states were captured once, and DSpark, DFlash and EAGLE-3 were trained on the same samples in the same order, then
measured side by side on the same prompts, beside plain decoding.
"""


def machine() -> dict[str, str]:
    """What the figures depend on."""
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            processor = line.split(":", 1)[1].strip()
            break
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return {"device": processor, "python": platform.python_version(), **versions}


def findings(report: dict[str, Any]) -> list[str]:
    """Whether the published order came out, with the evidence, for every set of prompts at every temperature."""
    first, second = EXPECTED
    lines = []
    for name, part in _parts(report):
        scopes = part["scopes"]
        scope = scopes.get("all") or next(iter(scopes.values()))
        pair = next(pair for pair in scope["pairs"] if {pair["one"], pair["other"]} == {first, second})
        sign = 1 if pair["other"] == first else -1
        difference = sign * pair["difference"] + 0.0  # no minus before a zero
        if pair["within_noise"] is None:
            verdict = "one prompt of a domain says nothing about the order"
        elif pair["within_noise"]:
            verdict = "the difference is within noise: this run does not decide the order"
        else:
            verdict = "the published order came out" if difference > 0 else "the published order did NOT come out"
        bounds = "" if pair["low"] is None else " ({:.3f} to {:.3f})".format(*sorted(sign * pair[key] for key in
                                                                                    ("low", "high")))  # fmt: skip
        lines.append(f"{name}: {first} - {second} = {difference:+.3f}{bounds} tokens per round; {verdict}.")
    return lines


def document(report: dict[str, Any]) -> str:
    """The page for one report."""
    settings = report["settings"]
    lines = [_INTRODUCTION]
    lines.append(
        f"{settings['rows']} conversations, {settings['steps']} steps ({settings['samples']} samples) each, "
        f"K = {settings['block']}, start: {settings['init']}, answers of at most {settings['max_new_tokens']} tokens. "
        f"Identical to plain decoding at temperature 0: "
        + ", ".join(f"{kind} {same} of {all_of}" for kind, (same, all_of) in report["identical"].items())
        + "."
    )
    lines += ["", "## Acceptance length", ""]
    for name, part in _parts(report):
        lines += [f"{name}:", "", *_lengths(part["scopes"]), ""]
    lines += [f"Acceptance length: {DEFINITIONS['acceptance_length']}", "", f"In brackets: {DEFINITIONS['interval']}"]
    lines += ["", f"Bold: the longest of a row, and those within noise of it. {DEFINITIONS['within_noise']}", ""]
    lines += [f"- {line}" for line in findings(report)]
    lines += ["", "## Acceptance by position", ""]
    for section, curves in report["positions"].items():
        title = f"Conditional acceptance by slot, {_name(section)}, temperature 0"
        slots = range(max(map(len, curves.values())))
        lines += [f"{title}:", "", *_table(["drafter", *(f"slot {k}" for k in slots)], [
            [kind, *("–" if rate is None else f"{rate:.1%}" for rate in rates)] for kind, rates in curves.items()
        ])]  # fmt: skip
        lines += ["", f"![{title}](results-{section}.png)", ""]
    lines += [DEFINITIONS["accept_by_slot_conditional"], "", "## The run", ""]
    lines += _table(["stage", "seconds", "seconds per step", "loss at the end"], [
        [name, "–" if value is None else f"{value:.0f}", *_training(report["training"].get(name))]
        for name, value in report["seconds"].items()
    ])  # fmt: skip
    lines += [
        "",
        "Seconds of the whole stage, with its start and whatever it waited for; a dash where it was broken off and "
        "went on. Seconds per step are the median. The losses have other terms for each kind and do not compare them. "
        "How fast rounds are is another question: `make bench-decode`.",
        "",
    ]
    measured_on = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    lines.append(f"Measured by `{report['command']}` on: {measured_on}.")
    return "\n".join(lines) + "\n"


def _training(found: dict[str, float] | None) -> list[str]:
    return ["–", "–"] if found is None else [f"{found['step_seconds']:.2f}", f"{found['loss']:.3f}"]


def _parts(report: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for section, temperatures in report["comparison"].items():
        for part in temperatures.values():
            yield f"{_name(section)}, temperature {part['temperature']:g}", part


def _name(section: str) -> str:
    return "Held-out prompts" if section == "held_out" else "Benchmarks"


def _lengths(scopes: dict[str, Any]) -> list[str]:
    drafters = list(next(iter(scopes.values()))["lengths"])
    rows = []
    for name, scope in scopes.items():
        best = best_of(scope)
        rows.append([name, *(_length(scope["lengths"][drafter], drafter in best) for drafter in drafters)])
    return _table(["prompts", *drafters], rows)


def _length(row: dict[str, Any], best: bool) -> str:
    if row["value"] is None:
        return "–"
    value = f"**{row['value']:.3f}**" if best else f"{row['value']:.3f}"
    return value if row["low"] is None else f"{value} ({row['low']:.2f} to {row['high']:.2f})"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    return lines + [f"| {' | '.join(row)} |" for row in rows]
