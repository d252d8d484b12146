"""Drafters beside each other on the same prompts: intervals, and which differences are more than chance.

results -> kept tokens and rounds per conversation -> the same 2,000 resamples for every drafter -> quantiles

A conversation is the unit that is drawn: its rounds, and its turns, resemble each other. Conversations are drawn within
their domain, so that every resample has the domains of the run.
Shape suffixes: R resamples, N conversations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dspark.evaluation.benchmarks import conversation_of
from dspark.evaluation.metrics import PromptResult
from dspark.sections import BENCHMARKS

RESAMPLES = 2000
LEVEL = 0.95

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _Counts:
    """Of one domain: how often each conversation is drawn in each resample, and what it counts for each drafter."""

    drawn_RN: Floats
    kept: Mapping[str, Floats]  # [N] by drafter
    rounds: Mapping[str, Floats]

    def lengths(self, drafter: str) -> Floats:
        """Acceptance length in the sample itself and then in each resample. [1 + R]"""
        drawn_RN = np.concatenate((np.ones_like(self.drawn_RN[:1]), self.drawn_RN))
        return _ratio(drawn_RN @ self.kept[drafter], drawn_RN @ self.rounds[drafter])


def compare(results: Sequence[PromptResult], seed: int) -> dict[str, Any]:
    """Acceptance lengths with intervals, and the differences of all pairs, at one temperature and batch size.

    {"temperature", "scopes": {name: {"lengths": {drafter: {"value", "low", "high"}}, "pairs": [{"one", "other",
    "difference", "low", "high", "within_noise"}]}}, "resamples", "level", "seed"}. Scopes are the domains, "mean math"
    and so on where benchmarks of a domain are averaged, and "all": every round, as in the tables. Only conversations
    that all drafters decoded count; intervals and verdicts are None where there is but one.
    """
    drafters = list(dict.fromkeys(result.drafter for result in results))
    counts = {domain: _counts(rows, drafters, seed, domain) for domain, rows in _by_domain(results).items()}
    scopes = {domain: {name: found.lengths(name) for name in drafters} for domain, found in counts.items()}
    groups: dict[str, list[str]] = {}
    for domain in counts:
        if domain in BENCHMARKS:
            groups.setdefault(f"mean {BENCHMARKS[domain]}", []).append(domain)
    for group, domains in groups.items():
        scopes[group] = {name: np.mean([scopes[one][name] for one in domains], axis=0) for name in drafters}
    if len(counts) > 1:
        together = _together(list(counts.values()))
        scopes["all"] = {name: together.lengths(name) for name in drafters}
    members = {name: _members(name, counts, groups) for name in scopes}
    return {
        "temperature": results[0].temperature,
        "scopes": {name: _scope(lengths, members[name]) for name, lengths in scopes.items()},
        "resamples": RESAMPLES,
        "level": LEVEL,
        "seed": seed,
    }


def best_of(scope: Mapping[str, Any]) -> list[str]:
    """The drafters with the longest acceptance, and those that are within noise of it."""
    lengths = {name: row["value"] for name, row in scope["lengths"].items() if row["value"] is not None}
    if not lengths:
        return []
    best = max(lengths, key=lambda name: lengths[name])
    near = {
        name for pair in scope["pairs"] if pair["within_noise"] and best in (pair["one"], pair["other"])
        for name in (pair["one"], pair["other"])
    }  # fmt: skip
    return [name for name, length in lengths.items() if length == lengths[best] or name in near]


def _by_domain(results: Sequence[PromptResult]) -> dict[str, list[PromptResult]]:
    domains: dict[str, list[PromptResult]] = {}
    for result in results:
        domains.setdefault(result.domain, []).append(result)
    return domains


def _counts(results: Sequence[PromptResult], drafters: Sequence[str], seed: int, domain: str) -> _Counts:
    kept: dict[str, dict[str, int]] = {name: {} for name in drafters}
    rounds: dict[str, dict[str, int]] = {name: {} for name in drafters}
    for result in results:
        name = conversation_of(result.id, result.turn)
        for sums, value in (
            (kept[result.drafter], sum(record["kept"] for record in result.rounds)),
            (rounds[result.drafter], len(result.rounds)),
        ):
            sums[name] = sums.get(name, 0) + value
    shared = sorted(set.intersection(*(set(sums) for sums in kept.values())))
    assert shared, "every drafter decodes every prompt"
    chances = np.full(len(shared), 1 / len(shared))
    # Draws of its own for each domain: with equal ones, means over domains would move in step, or cancel.
    drawn = np.random.default_rng([seed, crc32(domain.encode())]).multinomial(len(shared), chances, RESAMPLES)
    return _Counts(
        drawn.astype(np.float64),
        {name: np.array([sums[one] for one in shared], np.float64) for name, sums in kept.items()},
        {name: np.array([sums[one] for one in shared], np.float64) for name, sums in rounds.items()},
    )


def _together(parts: Sequence[_Counts]) -> _Counts:
    names = parts[0].kept
    return _Counts(
        np.concatenate([part.drawn_RN for part in parts], axis=1),
        {name: np.concatenate([part.kept[name] for part in parts]) for name in names},
        {name: np.concatenate([part.rounds[name] for part in parts]) for name in names},
    )


def _members(name: str, counts: Mapping[str, _Counts], groups: Mapping[str, Sequence[str]]) -> int:
    """Most conversations of a domain in the scope: with one alone there is nothing to draw from."""
    domains = [name] if name in counts else groups.get(name, list(counts))
    return max(counts[domain].drawn_RN.shape[1] for domain in domains)


def _scope(lengths: Mapping[str, Floats], members: int) -> dict[str, Any]:
    return {
        "lengths": {name: _interval("value", values, members) for name, values in lengths.items()},
        "pairs": [_pair(one, other, lengths[other] - lengths[one], members) for one, other in combinations(lengths, 2)],
    }


def _pair(one: str, other: str, differences: Floats, members: int) -> dict[str, Any]:
    """How much longer `other` is than `one`."""
    found = _interval("difference", differences, members)
    low, high = found["low"], found["high"]
    within = None if low is None or high is None else low <= 0 <= high
    return {"one": one, "other": other, **found, "within_noise": within}


def _interval(label: str, values: Floats, members: int) -> dict[str, float | None]:
    """The value of the sample, and the quantiles of its finite resamples."""
    finite = values[1:][np.isfinite(values[1:])]
    edge = (1 - LEVEL) / 2
    low, high = np.quantile(finite, (edge, 1 - edge)) if members > 1 and len(finite) else (None, None)
    value = float(values[0]) if np.isfinite(values[0]) else None
    return {label: value, "low": None if low is None else float(low), "high": None if high is None else float(high)}


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio: Floats = numerator / denominator
    return ratio
