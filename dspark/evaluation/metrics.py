"""What decoding one prompt gave, and the numbers that are made of it; `definitions.py` says what each one means.

Pure functions. A round record is {proposed, accepted, kept, confidences}. A rate without data is None.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dspark.sections import BENCHMARKS

Record = Mapping[str, Any]
TokenKind = Literal["accepted", "corrected", "bonus", "plain"]

PARTS = ("prefill", "draft", "verify", "other")
# What is averaged over the benchmarks of a domain.
GROUP_MEANS = ("acceptance_length", "published_length", "accepted_per_proposed", "verify_rate", "speedup")


@dataclass(frozen=True)
class PromptResult:
    """One prompt decoded by one drafter, and plainly, at one temperature. `dataclasses.asdict` of it is JSON.

    `seconds` holds PARTS; all times are those of the batch, prompt pass included, divided by its rows. With several
    drafters the plain decoding, done once, stands in the result of each.
    """

    id: str
    domain: str
    temperature: float
    prompt_tokens: int
    tokens: list[int]
    drafted: list[bool]
    finish: str
    rounds: list[dict[str, Any]]
    plain_tokens: list[int]
    identical: bool
    plain_seconds: float
    speculative_seconds: float
    seconds: dict[str, float]
    text: str
    prompt: str
    drafter: str = "drafter"
    batch: int = 1  # requests decoded together
    turn: int = 1
    difference: dict[str, Any] | None = None  # of a text that should be plain decoding's: {place, gap, roundings}


def acceptance_length(rounds: Sequence[Record]) -> float | None:
    return _ratio(_total(rounds, "kept"), len(rounds))


def published_length(rounds: Sequence[Record]) -> float | None:
    return _ratio(_total(rounds, "accepted") + len(rounds), len(rounds))


def verify_rate(rounds: Sequence[Record]) -> float | None:
    return _ratio(_total(rounds, "kept"), _total(rounds, "proposed") + len(rounds))


def accepted_per_proposed(rounds: Sequence[Record]) -> float | None:
    return _ratio(_total(rounds, "accepted"), _total(rounds, "proposed"))


def slot_rounds(rounds: Sequence[Record]) -> list[int]:
    """Rounds that proposed slot k, for k up to the longest proposal."""
    slots = max((record["proposed"] for record in rounds), default=0)
    return [sum(record["proposed"] > k for record in rounds) for k in range(slots)]


def slot_reached(rounds: Sequence[Record]) -> list[int]:
    """Of `slot_rounds`, those that accepted every slot before k."""
    return [
        sum(record["proposed"] > k and record["accepted"] >= k for record in rounds)
        for k in range(len(slot_rounds(rounds)))
    ]


def accept_by_slot(rounds: Sequence[Record]) -> list[float | None]:
    """Unconditional: a slot behind a rejected one counts as not accepted."""
    return [
        _ratio(sum(record["accepted"] > k for record in rounds), proposed)
        for k, proposed in enumerate(slot_rounds(rounds))
    ]


def accept_by_slot_conditional(rounds: Sequence[Record]) -> list[float | None]:
    """Given that the slots before were accepted; None for a slot that no round got to."""
    return [
        _ratio(sum(record["accepted"] > k for record in rounds), reached)
        for k, reached in enumerate(slot_reached(rounds))
    ]


def plain_tokens_per_second(results: Sequence[PromptResult]) -> float | None:
    return _ratio(sum(len(result.plain_tokens) for result in results), sum(result.plain_seconds for result in results))


def speculative_tokens_per_second(results: Sequence[PromptResult]) -> float | None:
    return _ratio(sum(len(result.tokens) for result in results), sum(result.speculative_seconds for result in results))


def speedup(results: Sequence[PromptResult]) -> float | None:
    """Per token, because sampled answers of the two decoders may differ in length."""
    plain = plain_tokens_per_second(results)
    speculative = speculative_tokens_per_second(results)
    return None if plain is None or speculative is None else _ratio(speculative, plain)


def identical(results: Sequence[PromptResult]) -> list[int] | None:
    """[equal, compared] at temperature 0; None above, where equal tokens are not asked for."""
    greedy = [result for result in results if result.temperature == 0]
    return [sum(result.identical for result in greedy), len(greedy)] if greedy else None


def differences(results: Sequence[PromptResult]) -> list[dict[str, Any]]:
    """Where texts leave plain decoding's at temperature 0, {id, place, gap, roundings}, the widest gap first."""
    found = [{"id": result.id} | result.difference for result in results if result.difference is not None]
    return sorted(found, key=lambda one: -one["roundings"])


def time_seconds(results: Sequence[PromptResult]) -> dict[str, float]:
    """Seconds of plain and of speculative decoding, and the PARTS of the latter."""
    plain = sum(result.plain_seconds for result in results)
    speculative = sum(result.speculative_seconds for result in results)
    parts = {part: sum(result.seconds[part] for result in results) for part in PARTS}
    return {"plain": plain, "speculative": speculative} | parts


def time_share(results: Sequence[PromptResult]) -> dict[str, float | None]:
    seconds = time_seconds(results)
    return {part: _ratio(seconds[part], sum(seconds[name] for name in PARTS)) for part in PARTS}


def token_kinds(result: PromptResult) -> list[TokenKind]:
    """Who made each token of the answer: an accepted draft, the target's correction of a rejected draft, its bonus
    after a draft accepted in full, or the target alone ("plain": the first token, and rounds without a proposal)."""
    kinds: list[TokenKind] = ["plain"] if result.tokens else []
    for record in result.rounds:
        proposed, accepted, kept = record["proposed"], record["accepted"], record["kept"]
        kinds += ["accepted"] * min(accepted, kept)
        if kept > accepted:
            kinds.append("plain" if proposed == 0 else "bonus" if accepted == proposed else "corrected")
    assert [kind == "accepted" for kind in kinds] == list(result.drafted), (
        f"rounds of {result.id} do not add up to its tokens"
    )
    return kinds


def summarise(results: Sequence[PromptResult]) -> dict[str, Any]:
    """{"t0": {"temperature", "overall": numbers, "by_domain": {domain: numbers}, "by_group": {domain: means}},
    "t1": ...}, plain JSON types.

    "t0" is greedy decoding, "t1" sampling at whatever temperature; one without results is left out.
    """
    summary: dict[str, Any] = {}
    for result in sorted(results, key=lambda result: result.temperature > 0):
        summary.setdefault("t1" if result.temperature > 0 else "t0", []).append(result)
    return {name: _at_one_temperature(chosen) for name, chosen in summary.items()}


def _at_one_temperature(results: Sequence[PromptResult]) -> dict[str, Any]:
    temperatures = {result.temperature for result in results}
    assert len(temperatures) == 1, f"one sampling temperature per summary, found {sorted(temperatures)}"
    domains = dict.fromkeys(result.domain for result in results)
    by_domain = {name: _numbers([result for result in results if result.domain == name]) for name in domains}
    return {
        "temperature": temperatures.pop(),
        "overall": _numbers(results),
        "by_domain": by_domain,
        "by_group": _by_group(by_domain),
    }


def _by_group(by_domain: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the benchmarks of each domain, which all weigh the same; {} without benchmarks."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for name, row in by_domain.items():
        if name in BENCHMARKS:
            groups.setdefault(BENCHMARKS[name], []).append(row)
    return {
        group: {"benchmarks": len(rows)} | {key: _mean([row[key] for row in rows]) for key in GROUP_MEANS}
        for group, rows in groups.items()
    }


def _numbers(results: Sequence[PromptResult]) -> dict[str, Any]:
    rounds = [record for result in results for record in result.rounds]
    return {
        "prompts": len(results),
        "rounds": len(rounds),
        "tokens": sum(len(result.tokens) for result in results),
        "plain_tokens": sum(len(result.plain_tokens) for result in results),
        "acceptance_length": acceptance_length(rounds),
        "published_length": published_length(rounds),
        "verify_rate": verify_rate(rounds),
        "accepted_per_proposed": accepted_per_proposed(rounds),
        "accept_by_slot": accept_by_slot(rounds),
        "accept_by_slot_conditional": accept_by_slot_conditional(rounds),
        "slot_rounds": slot_rounds(rounds),
        "slot_reached": slot_reached(rounds),
        "tokens_per_second": {
            "plain": plain_tokens_per_second(results),
            "speculative": speculative_tokens_per_second(results),
        },
        "speedup": speedup(results),
        "identical": identical(results),
        "differences": differences(results),
        "seconds": time_seconds(results),
        "time_share": time_share(results),
    }


def _total(rounds: Sequence[Record], key: str) -> int:
    return sum(record[key] for record in rounds)


def _mean(values: Sequence[float | None]) -> float | None:
    """None if one of the values is missing: a mean over other benchmarks would be another number."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
