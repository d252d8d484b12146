"""The report of a run: one self-contained HTML page, its pictures as PNG files, and the numbers of `result.json`.

results, history -> summaries -> pictures (light and dark) -> report.html.j2 -> report.html
The page holds no script and asks for nothing outside itself; every text in it is escaped, prompts come from anywhere.
"""

import base64
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from dspark.evaluation import plots
from dspark.evaluation.benchmarks import is_benchmark
from dspark.evaluation.metrics import DEFINITIONS, PromptResult, acceptance_length, summarise, token_kinds

DURATIONS = ("total", "prepare", "train", "evaluate")
TRAINING = {
    "loss": "loss",
    "loss_ce": "cross-entropy term",
    "loss_l1": "L1 term",
    "loss_confidence": "confidence term",
    "tau_probabilistic": "τ sampled",
    "tau_greedy": "τ greedy",
    "tokens_per_second": "tokens per second",
}
ENDS = 10  # logged steps averaged at either end of the training
FEW_ROUNDS = 10  # a rate from fewer is printed in grey; the conditional picture leaves it out
SAMPLES_OPEN, SAMPLES = 3, 8


@dataclass(frozen=True)
class ReportData:
    """What the page shows. An empty `history` or results at one temperature only leave their sections out.

    `facts` maps a label to a text (target, data, drafter, machine), `result` is what `result_json` gave, `token_texts`
    turns token ids into one text each, `commands` are the lines that made the run.
    """

    title: str
    settings_yaml: str
    facts: Mapping[str, str]
    history: Sequence[Mapping[str, Any]]
    results: Sequence[PromptResult]
    result: Mapping[str, Any]
    token_texts: Callable[[Sequence[int]], list[str]]
    commands: Sequence[str]


class Picture(NamedTuple):
    light: bytes
    dark: bytes
    alt: str


class Round(NamedTuple):
    """Tokens of one round as (kind, text); the first one of a sample is the prompt pass."""

    note: str
    tokens: list[tuple[str, str]]


class Shown(NamedTuple):
    """A generated sample. `plain` is set where its tokens differ from plain decoding at temperature 0."""

    result: PromptResult
    acceptance: float | None
    rounds: list[Round]
    plain: str | None


def result_json(
    results: Sequence[PromptResult],
    seconds: Mapping[str, float],
    steps: int | None,
    model_version: str | int | None,
    history: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The content of `result.json`; what was not measured, or is not finite, is None.

    The numbers at the top are of the held-out prompts; of the benchmarks only where nothing else was decoded. Both
    follow in full, by temperature and domain.
    """
    held_out, benchmarks = _by_origin(results)
    main = held_out or benchmarks
    overall = {name: part["overall"] for name, part in main.items()}
    greedy = overall.get("t0", {})
    result = {
        "acceptance_length": {name: overall.get(name, {}).get("acceptance_length") for name in ("t0", "t1")},
        "identical": greedy.get("identical"),
        "speedup": greedy.get("speedup"),
        "tokens_per_second": greedy.get("tokens_per_second", {"plain": None, "speculative": None}),
        "seconds": dict.fromkeys(DURATIONS) | dict(seconds),
        "steps": steps,
        "model_version": model_version,
        "training": {name: ends for name in TRAINING if (ends := _ends(history, name)) is not None},
        "held_out": held_out,
        "benchmarks": benchmarks,
    }
    plain: dict[str, Any] = _plain(result)
    return plain


def write_report(folder: Path, report: ReportData) -> Path:
    """Write `report.html` and `plots/*.png` into `folder`, which is made where it is missing; the page's path."""
    held_out, benchmarks = _by_origin(report.results)
    sections = {name: part for name, part in (("held_out", held_out), ("benchmarks", benchmarks)) if part}
    pictures = _pictures(report.history, sections)
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        (folder / "plots" / f"{name}.png").write_bytes(picture.light)
    page = _environment().get_template("report.html.j2").render(
        report=report,
        sections=sections,
        pictures=pictures,
        samples=[_shown(result, report.token_texts) for result in _samples(report.results)],
        samples_open=SAMPLES_OPEN,
        few_rounds=FEW_ROUNDS,
        definitions=DEFINITIONS,
        training_names=TRAINING,
        ends=ENDS,
    )  # fmt: skip
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _environment() -> Environment:
    # Autoescape by file name would leave it off: the template ends in .j2.
    environment = Environment(
        loader=PackageLoader("dspark.evaluation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": _number, "share": _share, "duration": _duration, "data_uri": _data_uri}
    return environment


def _by_origin(results: Sequence[PromptResult]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Summaries of the held-out prompts and of the benchmarks: one must not dilute the other."""
    held_out = [result for result in results if not is_benchmark(result.id, result.domain)]
    benchmarks = [result for result in results if is_benchmark(result.id, result.domain)]
    return summarise(held_out), summarise(benchmarks)


def _pictures(history: Sequence[Mapping[str, Any]], sections: Mapping[str, dict[str, Any]]) -> dict[str, Picture]:
    """Only pictures of what was measured; those of the benchmarks carry their section in the name."""
    pictures: dict[str, Picture] = {}
    if _ends(history, "loss"):
        pictures["loss"] = _picture("Training loss and its terms over the steps", plots.loss_curves, history)
    if _ends(history, "tau_probabilistic"):
        pictures["tau"] = _picture("Expected tokens per round over the steps", plots.tau_curves, history)
    for section, summary in sections.items():
        suffix = "" if section == "held_out" else f"_{section}"
        pictures |= {name + suffix: picture for name, picture in _section_pictures(summary).items()}
    return pictures


def _section_pictures(summary: Mapping[str, Any]) -> dict[str, Picture]:
    main = next(iter(summary.values()))
    pictures: dict[str, Picture] = {}
    slots = {name: row["accept_by_slot"] for name, row in main["by_domain"].items() if row["accept_by_slot"]}
    given = {name: _well_measured(main["by_domain"][name]) for name in slots}
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


def _well_measured(row: Mapping[str, Any]) -> list[float | None]:
    """Conditional acceptance of the slots that enough rounds got to."""
    rates = zip(row["accept_by_slot_conditional"], row["slot_reached"], strict=True)
    return [rate if reached >= FEW_ROUNDS else None for rate, reached in rates]


def _picture(alt: str, draw: Callable[..., bytes], *content: Any) -> Picture:
    return Picture(draw(*content, plots.LIGHT), draw(*content, plots.DARK), alt)


def _samples(results: Sequence[PromptResult]) -> list[PromptResult]:
    """The first prompt of each domain at the lowest temperature: not picked by how well it went."""
    lowest = min((result.temperature for result in results), default=0.0)
    first: dict[tuple[bool, str], PromptResult] = {}
    for result in results:
        if result.temperature == lowest:
            first.setdefault((is_benchmark(result.id, result.domain), result.domain), result)
    return list(first.values())[:SAMPLES]


def _shown(result: PromptResult, token_texts: Callable[[Sequence[int]], list[str]]) -> Shown:
    tokens = list(zip(token_kinds(result), token_texts(result.tokens), strict=True))
    rounds = [Round("prompt pass", list(tokens[:1]))]
    at = 1
    for number, record in enumerate(result.rounds, start=1):
        note = f"round {number}: {record['proposed']} proposed, {record['accepted']} accepted, {record['kept']} kept"
        rounds.append(Round(note, list(tokens[at : at + record["kept"]])))
        at += record["kept"]
    differs = result.temperature == 0 and not result.identical
    plain = "".join(token_texts(result.plain_tokens)) if differs else None
    return Shown(result, acceptance_length(result.rounds), rounds, plain)


def _ends(history: Sequence[Mapping[str, Any]], name: str) -> dict[str, float] | None:
    """Mean over the first and the last ENDS logged steps that have a finite value."""
    values = [record[name] for record in history if record.get(name) is not None and math.isfinite(record[name])]
    if not values:
        return None
    first, last = values[:ENDS], values[-ENDS:]
    return {"first": sum(first) / len(first), "last": sum(last) / len(last)}


def _plain(value: Any) -> Any:
    """The same in JSON's own types; JSON has no NaN and no infinity, they become None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if math.isfinite(value) else None


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:.{digits}%}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
