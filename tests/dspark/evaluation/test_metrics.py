"""Every number of the tables, against values counted by hand."""

import json
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.evaluation.definitions import DEFINITIONS
from dspark.evaluation.metrics import (
    PromptResult,
    accept_by_slot,
    accept_by_slot_conditional,
    acceptance_length,
    accepted_per_proposed,
    identical,
    published_length,
    slot_reached,
    slot_rounds,
    speedup,
    summarise,
    time_share,
    token_kinds,
    verify_rate,
)

Record = dict[str, Any]


def round_of(proposed: int, accepted: int, kept: int | None = None) -> Record:
    return {
        "proposed": proposed,
        "accepted": accepted,
        "kept": accepted + 1 if kept is None else kept,
        "confidences": [0.5] * proposed,
    }


def result_of(
    rounds: list[Record],
    *,
    name: str = "p",
    domain: str = "math",
    temperature: float = 0.0,
    same: bool = True,
    seconds: tuple[float, float] = (2.0, 1.0),
    plain_tokens: int | None = None,
) -> PromptResult:
    """A result whose tokens follow from its rounds: one of the prompt pass, then what each round kept."""
    drafted = [False]
    for record in rounds:
        drafted += [i < record["accepted"] for i in range(record["kept"])]
    tokens = list(range(len(drafted)))
    plain, speculative = seconds
    return PromptResult(
        id=name, domain=domain, temperature=temperature, prompt_tokens=5, tokens=tokens, drafted=drafted,
        finish="length", rounds=rounds, plain_tokens=list(range(plain_tokens or len(tokens))), identical=same,
        plain_seconds=plain, speculative_seconds=speculative,
        seconds={part: speculative * share for part, share in
                 {"prefill": 0.125, "draft": 0.25, "verify": 0.5, "other": 0.125}.items()},
        text="answer", prompt="question",
    )  # fmt: skip


# Accepted 2 of 3; all 3; none; 2 of 3 where a stop token left only the first.
ROUNDS = [round_of(3, 2), round_of(3, 3), round_of(3, 0), round_of(3, 2, kept=1)]
# A confidence threshold shortens proposals, down to none.
SHORT_ROUNDS = [round_of(1, 1), round_of(3, 1), round_of(0, 0)]


def test_acceptance_length_counts_what_was_kept_and_the_published_count_does_not() -> None:
    assert acceptance_length(ROUNDS) == (3 + 4 + 1 + 1) / 4
    assert published_length(ROUNDS) == (3 + 4 + 1 + 3) / 4


def test_the_rates_divide_by_verified_and_by_proposed_tokens() -> None:
    assert verify_rate(ROUNDS) == 9 / 16
    assert accepted_per_proposed(ROUNDS) == 7 / 12
    assert verify_rate(SHORT_ROUNDS) == 5 / 7
    assert accepted_per_proposed(SHORT_ROUNDS) == 2 / 4


def test_acceptance_by_slot_is_given_unconditional_and_conditional() -> None:
    assert accept_by_slot(ROUNDS) == [3 / 4, 3 / 4, 1 / 4]
    assert accept_by_slot_conditional(ROUNDS) == [3 / 4, 3 / 3, 1 / 3]


def test_a_slot_counts_only_the_rounds_that_proposed_it() -> None:
    assert slot_rounds(SHORT_ROUNDS) == [2, 1, 1]
    assert slot_reached(SHORT_ROUNDS) == [2, 1, 0]
    assert accept_by_slot(SHORT_ROUNDS) == [1.0, 0.0, 0.0]
    assert accept_by_slot_conditional(SHORT_ROUNDS) == [1.0, 0.0, None]


def test_rates_without_data_are_none() -> None:
    assert [acceptance_length([]), published_length([]), verify_rate([]), accepted_per_proposed([])] == [None] * 4
    assert accepted_per_proposed([round_of(0, 0)]) is None
    assert accept_by_slot([]) == accept_by_slot_conditional([]) == []
    timeless = result_of([], seconds=(0.0, 0.0))
    assert speedup([timeless]) is None and speedup([]) is None
    assert set(time_share([timeless]).values()) == {None}
    assert summarise([]) == {}


@given(st.integers(1, 6).flatmap(lambda k: st.tuples(st.just(k), st.lists(st.integers(0, k), min_size=1))))
def test_conditional_rates_multiply_to_the_unconditional_one_and_those_sum_to_the_published_count(
    drawn: tuple[int, list[int]],
) -> None:
    block, accepted = drawn
    rounds = [round_of(block, count) for count in accepted]
    conditional = [rate or 0.0 for rate in accept_by_slot_conditional(rounds)]
    unconditional = [rate for rate in accept_by_slot(rounds) if rate is not None]
    assert unconditional == pytest.approx([prod(conditional[: k + 1]) for k in range(block)])
    assert published_length(rounds) == pytest.approx(1 + sum(unconditional))


@given(st.lists(st.integers(0, 5).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1))
def test_rates_stay_between_0_and_1_whatever_was_proposed(drawn: list[tuple[int, int]]) -> None:
    rounds = [round_of(proposed, accepted) for proposed, accepted in drawn]
    rates = accept_by_slot(rounds) + accept_by_slot_conditional(rounds) + [verify_rate(rounds)]
    assert all(0 <= rate <= 1 for rate in rates if rate is not None)


def test_speedup_compares_equal_numbers_of_tokens() -> None:
    # 4 tokens in 1 s against 8 plain ones in 4 s: 0.25 s and 0.5 s a token.
    sampled = result_of([round_of(3, 2)], temperature=1.0, seconds=(4.0, 1.0), plain_tokens=8)
    assert speedup([sampled]) == 2.0
    assert summarise([sampled])["t1"]["overall"]["tokens_per_second"] == {"plain": 2.0, "speculative": 4.0}


def test_identity_is_counted_at_temperature_0_only() -> None:
    results = [result_of(ROUNDS), result_of(ROUNDS, same=False), result_of(ROUNDS, temperature=0.7, same=False)]
    assert identical(results) == [1, 2]
    assert identical(results[2:]) is None


def test_a_summary_is_nested_by_temperature_and_domain() -> None:
    results = [
        result_of([round_of(2, 0)], temperature=0.7, domain="chat"),
        result_of([round_of(2, 2)], domain="math"),
        result_of([round_of(2, 1)], domain="code"),
        result_of([round_of(2, 0)], domain="math"),
    ]
    summary = summarise(results)
    assert list(summary) == ["t0", "t1"]
    assert summary["t1"]["temperature"] == 0.7
    assert list(summary["t0"]["by_domain"]) == ["math", "code"]
    assert summary["t0"]["by_domain"]["math"]["acceptance_length"] == 2.0
    assert summary["t0"]["overall"]["acceptance_length"] == 2.0
    assert summary["t0"]["overall"]["prompts"] == 3
    assert summary["t1"]["overall"]["acceptance_length"] == 1.0
    assert summary["t0"]["overall"]["seconds"] == {
        "plain": 6.0, "speculative": 3.0, "prefill": 0.375, "draft": 0.75, "verify": 1.5, "other": 0.375,
    }  # fmt: skip
    assert summary["t0"]["overall"]["time_share"] == {"prefill": 0.125, "draft": 0.25, "verify": 0.5, "other": 0.125}


def test_a_summary_is_plain_json_and_each_of_its_numbers_is_defined() -> None:
    summary = summarise([result_of(ROUNDS), result_of(SHORT_ROUNDS, temperature=1.0)])
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    for part in summary.values():
        assert set(part["overall"]) <= set(DEFINITIONS)
        assert part["overall"].keys() == part["by_domain"]["math"].keys()


def test_two_sampling_temperatures_are_never_averaged() -> None:
    with pytest.raises(AssertionError, match="one sampling temperature"):
        summarise([result_of(ROUNDS, temperature=0.5), result_of(ROUNDS, temperature=1.0)])


def test_each_token_names_its_maker() -> None:
    stopped = [round_of(2, 1), round_of(2, 2), round_of(0, 0), round_of(2, 2, kept=1)]
    assert token_kinds(result_of(stopped)) == [
        "plain",
        "accepted", "corrected",
        "accepted", "accepted", "bonus",
        "plain",
        "accepted",
    ]  # fmt: skip


def test_rounds_that_contradict_the_tokens_are_a_defect() -> None:
    result = result_of([round_of(2, 1)])
    result.drafted.append(True)
    with pytest.raises(AssertionError, match="do not add up"):
        token_kinds(result)
