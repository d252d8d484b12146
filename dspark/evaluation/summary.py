"""The numbers of a run as plain JSON: what `result.json` holds, and what the page, the tables and MLflow show.

results -> by drafter -> held-out prompts and benchmarks apart -> numbers; all drafters -> comparison
"""

import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dspark.evaluation.benchmarks import is_benchmark
from dspark.evaluation.comparison import compare
from dspark.evaluation.confidence import confidence_numbers
from dspark.evaluation.metrics import PromptResult, summarise

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
SECTIONS = ("held_out", "benchmarks")


def result_json(
    results: Sequence[PromptResult],
    seconds: Mapping[str, float],
    steps: int | None,
    model_version: str | int | None,
    history: Sequence[Mapping[str, Any]],
    seed: int = 0,
) -> dict[str, Any]:
    """The content of `result.json`; what was not measured, or is not finite, is None.

    The numbers at the top are those of the first drafter at the first batch size: of the held-out prompts, and of the
    benchmarks only where nothing else was decoded. Both follow in full, by temperature and domain; then the same for
    every drafter by name, and the `comparison` of all, whose resamples `seed` draws.
    """
    drafters = {name: _drafter(chosen) for name, chosen in _by_drafter(results).items()}
    first: Mapping[str, Any] = next(iter(drafters.values()), {})
    held_out, benchmarks = (first.get(section, {}) for section in SECTIONS)
    overall = {name: part["overall"] for name, part in (held_out or benchmarks).items()}
    greedy = overall.get("t0", {})
    result = {
        "acceptance_length": {name: overall.get(name, {}).get("acceptance_length") for name in ("t0", "t1")},
        "identical": greedy.get("identical"),
        "speedup": greedy.get("speedup"),
        "tokens_per_second": greedy.get("tokens_per_second", {"plain": None, "speculative": None}),
        "seconds": dict.fromkeys(DURATIONS) | dict(seconds),
        "steps": steps,
        "model_version": model_version,
        "training": {name: ends for name in TRAINING if (ends := ends_of(history, name)) is not None},
        "held_out": held_out,
        "benchmarks": benchmarks,
        "drafters": drafters,
        "comparison": _comparison(results, seed),
    }
    plain: dict[str, Any] = _plain(result)
    return plain


def main_results(results: Sequence[PromptResult]) -> list[PromptResult]:
    """Those at the first batch size: the tokens at the others are the same, and must not count twice."""
    return [result for result in results if result.batch == results[0].batch]


def by_origin(results: Sequence[PromptResult]) -> dict[str, list[PromptResult]]:
    """Held-out prompts and benchmarks, where there are any: one must not dilute the other."""
    benchmarks = [result for result in results if is_benchmark(result.id, result.domain)]
    held_out = [result for result in results if not is_benchmark(result.id, result.domain)]
    return {name: rows for name, rows in zip(SECTIONS, (held_out, benchmarks), strict=True) if rows}


def ends_of(history: Sequence[Mapping[str, Any]], name: str) -> dict[str, float] | None:
    """Mean over the first and the last ENDS logged steps that have a finite value."""
    values = [record[name] for record in history if record.get(name) is not None and math.isfinite(record[name])]
    if not values:
        return None
    first, last = values[:ENDS], values[-ENDS:]
    return {"first": sum(first) / len(first), "last": sum(last) / len(last)}


def _by_drafter(results: Sequence[PromptResult]) -> dict[str, list[PromptResult]]:
    drafters: dict[str, list[PromptResult]] = {}
    for result in results:
        drafters.setdefault(result.drafter, []).append(result)
    return drafters


def _drafter(results: Sequence[PromptResult]) -> dict[str, Any]:
    main = main_results(results)
    sections = by_origin(main)
    greatest = next(iter(sections.values()))
    lowest = min(result.temperature for result in greatest)
    rounds = [record for result in greatest if result.temperature == lowest for record in result.rounds]
    return {
        **{section: summarise(sections.get(section, [])) for section in SECTIONS},
        "batches": list(_batches(results)),
        "confidence": confidence_numbers(rounds),
    }


def _batches(results: Sequence[PromptResult]) -> Iterator[dict[str, Any]]:
    """Speed at each batch size; all prompts of a section and temperature together."""
    for size in dict.fromkeys(result.batch for result in results):
        for section, chosen in by_origin([result for result in results if result.batch == size]).items():
            for part in summarise(chosen).values():
                names = ("prompts", "acceptance_length", "tokens_per_second", "speedup", "time_share")
                numbers_of = {name: part["overall"][name] for name in names}
                yield {"batch": size, "prompts_of": section, "temperature": part["temperature"]} | numbers_of


def _comparison(results: Sequence[PromptResult], seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for section, chosen in by_origin(main_results(results)).items():
        at = {"t0": [one for one in chosen if one.temperature == 0], "t1": [one for one in chosen if one.temperature]}
        found[section] = {name: compare(rows, seed) for name, rows in at.items() if rows}
    return found


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
