"""Which pictures a run has, by the name of their file: drawn by `plots.py` in a light and a dark theme.

Names say what, then of which drafter where there are several, then of which prompts: slots_dflash_benchmarks.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dspark.evaluation import plots
from dspark.evaluation.figures import DARK, LIGHT
from dspark.evaluation.summary import SECTIONS, ends_of

FEW_ROUNDS = 10  # a rate from fewer is printed in grey; the conditional picture leaves it out


class Picture(NamedTuple):
    light: bytes
    dark: bytes
    alt: str


def suffix_of(drafter: str, section: str, drafters: Sequence[str]) -> str:
    """The end of the names of a section's pictures; the only drafter and its held-out prompts add nothing."""
    named = f"_{re.sub(r'[^A-Za-z0-9.-]+', '-', drafter)}" if len(drafters) > 1 else ""
    return named if section == "held_out" else f"{named}_{section}"


def pictures_of(history: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> dict[str, Picture]:
    """Only pictures of what was measured; `result` is that of `result_json`."""
    pictures: dict[str, Picture] = {}
    if ends_of(history, "loss"):
        pictures["loss"] = _picture("Training loss and its terms over the steps", plots.loss_curves, history)
    if ends_of(history, "tau_probabilistic"):
        pictures["tau"] = _picture("Expected tokens per round over the steps", plots.tau_curves, history)
    drafters: Mapping[str, Any] = result["drafters"]
    for name, drafter in drafters.items():
        for section in SECTIONS:
            if drafter[section]:
                suffix = suffix_of(name, section, list(drafters))
                pictures |= {found + suffix: one for found, one in _section_pictures(drafter[section]).items()}
        suffix = suffix_of(name, "held_out", list(drafters))
        pictures |= {found + suffix: one for found, one in _head_pictures(drafter).items()}
    if len(drafters) > 1:
        pictures |= _side_by_side(drafters)
    return pictures


def well_measured(row: Mapping[str, Any]) -> list[float | None]:
    """Conditional acceptance of the slots that enough rounds got to."""
    rates = zip(row["accept_by_slot_conditional"], row["slot_reached"], strict=True)
    return [rate if reached >= FEW_ROUNDS else None for rate, reached in rates]


def _section_pictures(summary: Mapping[str, Any]) -> dict[str, Picture]:
    main = next(iter(summary.values()))
    pictures: dict[str, Picture] = {}
    slots = {name: row["accept_by_slot"] for name, row in main["by_domain"].items() if row["accept_by_slot"]}
    given = {name: well_measured(main["by_domain"][name]) for name in slots}
    if slots:
        pictures["slots"] = _picture(
            "Unconditional acceptance by slot and domain",
            plots.slot_curves, slots, "accepted, unconditional",
        )  # fmt: skip
    if any(rate is not None for rates in given.values() for rate in rates):
        pictures["slots_conditional"] = _picture(
            "Conditional acceptance by slot and domain",
            plots.slot_curves, given, "accepted, conditional",
        )  # fmt: skip
    pictures["speed"] = _picture(
        "Tokens per second of plain and speculative decoding, by domain", plots.speed_bars, main["by_domain"]
    )
    pictures["time"] = _picture(
        "Milliseconds per token of plain decoding and of the parts of speculative decoding",
        plots.time_bars, {f"T = {part['temperature']:g}": part["overall"] for part in summary.values()},
    )  # fmt: skip
    return pictures


def _head_pictures(drafter: Mapping[str, Any]) -> dict[str, Picture]:
    """Of the confidence head."""
    found = drafter["confidence"]
    if found is None:
        return {}
    pictures: dict[str, Picture] = {}
    if found["thresholds"]:
        pictures["thresholds"] = _picture(
            "Tokens kept and verified per round over the confidence threshold", plots.threshold_curves,
            found["thresholds"],
        )  # fmt: skip
    for kind in ("confidence", "survival"):
        pictures[f"reliability_{kind}"] = _picture(
            f"Accepted share over the predicted {kind}, by slot", plots.reliability_curves,
            {f"slot {row['slot']}": row[kind]["bins"] for row in found["slots"]}, kind,
        )  # fmt: skip
    return pictures


def _side_by_side(drafters: Mapping[str, Any]) -> dict[str, Picture]:
    """Conditional acceptance by slot, one line per drafter: all prompts of a section at its first temperature."""
    pictures: dict[str, Picture] = {}
    for section in SECTIONS:
        overall = {
            name: next(iter(drafter[section].values()))["overall"]
            for name, drafter in drafters.items()
            if drafter[section]
        }
        curves = {name: well_measured(row) for name, row in overall.items()}
        if any(rate is not None for rates in curves.values() for rate in rates):
            pictures[f"positions{'' if section == 'held_out' else '_' + section}"] = _picture(
                "Conditional acceptance by slot and drafter", plots.slot_curves, curves, "accepted, conditional"
            )
    return pictures


def _picture(alt: str, draw: Callable[..., bytes], *content: Any) -> Picture:
    return Picture(draw(*content, LIGHT), draw(*content, DARK), alt)
