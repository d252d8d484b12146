"""The report of a run: one self-contained HTML page, and its pictures as PNG files.

numbers of `summary.py`, history -> pictures (light and dark) -> report.html.j2 -> report.html
The page holds no script and asks for nothing outside itself; every text in it is escaped, prompts come from anywhere.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from dspark.evaluation.benchmarks import is_benchmark
from dspark.evaluation.comparison import best_of
from dspark.evaluation.definitions import DEFINITIONS
from dspark.evaluation.metrics import PromptResult, acceptance_length, token_kinds
from dspark.evaluation.pictures import FEW_ROUNDS, pictures_of, suffix_of
from dspark.evaluation.summary import ENDS, TRAINING, main_results

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


def write_report(folder: Path, report: ReportData) -> Path:
    """Write `report.html` and `plots/*.png` into `folder`, which is made where it is missing; the page's path."""
    drafters = report.result["drafters"]
    pictures = pictures_of(report.history, report.result)
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        (folder / "plots" / f"{name}.png").write_bytes(picture.light)
    page = _environment().get_template("report.html.j2").render(
        report=report,
        drafters=drafters,
        comparison=report.result["comparison"],
        suffix_of=suffix_of,
        best_of=best_of,
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


def _samples(results: Sequence[PromptResult]) -> list[PromptResult]:
    """The first prompt of each domain at the lowest temperature, by every drafter: not picked by how well it went."""
    lowest = min((result.temperature for result in results), default=0.0)
    first: dict[tuple[bool, str], dict[str, PromptResult]] = {}
    for result in main_results(results):
        if result.temperature == lowest:
            place = is_benchmark(result.id, result.domain), result.domain
            first.setdefault(place, {}).setdefault(result.drafter, result)
    return [result for by_drafter in first.values() for result in by_drafter.values()][:SAMPLES]


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
