"""Drafters beside each other: intervals, pairs, and what is within noise."""

from dataclasses import replace

import pytest

from dspark.evaluation.comparison import best_of, compare
from dspark.evaluation.metrics import PromptResult
from tests.dspark.evaluation.test_metrics import result_of, round_of


def results_of(drafter: str, accepted: list[int], domain: str = "math") -> list[PromptResult]:
    """One prompt for each number, with five rounds that all accept so many drafts."""
    found = [
        result_of([round_of(8, count)] * 5, name=f"{domain}/{i}", domain=domain) for i, count in enumerate(accepted)
    ]
    return [replace(one, drafter=drafter) for one in found]


NOISY = [0, 1, 2, 3, 4, 5, 6, 7] * 4


def test_a_small_difference_on_every_prompt_counts_although_the_prompts_differ_widely() -> None:
    # Prompts spread over 1 to 8 tokens a round, yet `better` keeps one more on each: what pairs are for.
    worse = results_of("worse", NOISY)
    better = results_of("better", [count + 1 for count in NOISY])
    scope = compare(worse + better, seed=3)["scopes"]["math"]
    assert scope["lengths"]["worse"]["value"] == pytest.approx(4.5)
    assert scope["lengths"]["worse"]["high"] > scope["lengths"]["better"]["low"]  # unpaired they overlap
    (pair,) = scope["pairs"]
    assert (pair["one"], pair["other"], pair["within_noise"]) == ("worse", "better", False)
    assert pair["low"] == pytest.approx(1) and pair["high"] == pytest.approx(1)
    assert best_of(scope) == ["better"]


def test_a_difference_that_another_choice_of_prompts_turns_round_is_noise() -> None:
    one = results_of("one", NOISY)
    other = results_of("other", [*NOISY[3:], *NOISY[:3], ][: len(NOISY)])  # fmt: skip
    (pair,) = compare(one + other, seed=3)["scopes"]["math"]["pairs"]
    assert pair["within_noise"] is True and pair["low"] < 0 < pair["high"]
    assert best_of(compare(one + other, seed=3)["scopes"]["math"]) == ["one", "other"]


def test_the_interval_is_that_of_the_mean_and_the_seed_decides_it() -> None:
    results = results_of("a", NOISY)
    row = compare(results, seed=3)["scopes"]["math"]["lengths"]["a"]
    # Uniform on 8 values: deviation 2.29, over 32 prompts 0.405; 1.96 of it to either side.
    assert row["low"] == pytest.approx(4.5 - 0.79, abs=0.1) and row["high"] == pytest.approx(4.5 + 0.79, abs=0.1)
    assert compare(results, seed=3) == compare(results[::-1], seed=3)
    assert compare(results, seed=3) != compare(results, seed=4)


def test_benchmarks_of_equal_size_are_drawn_apart() -> None:
    # By turns one more and one less, in the other benchmark the other way round: draws in step would cancel.
    turns, level = [3, 1] * 8, [2] * 16
    one = results_of("one", level, "gsm8k") + results_of("one", level, "math500")
    other = results_of("other", turns, "gsm8k") + results_of("other", turns[::-1], "math500")
    (pair,) = compare(one + other, seed=0)["scopes"]["mean math"]["pairs"]
    # A mean over 32 draws of +1 or -1 deviates by 0.177.
    assert pair["high"] == pytest.approx(1.96 * 0.177, abs=0.08) and pair["low"] == pytest.approx(
        -pair["high"], abs=0.1
    )


def test_benchmarks_of_a_domain_weigh_the_same_and_all_counts_rounds() -> None:
    results = results_of("a", [1] * 9, "gsm8k") + results_of("a", [3], "aime25") + results_of("a", [5], "humaneval")
    scopes = compare(results, seed=0)["scopes"]
    values = {name: scope["lengths"]["a"]["value"] for name, scope in scopes.items()}
    assert values == pytest.approx(
        {"gsm8k": 2, "aime25": 4, "humaneval": 6, "mean math": 3, "mean code": 6, "all": (9 * 2 + 4 + 6) / 11}
    )
    assert scopes["humaneval"]["lengths"]["a"]["low"] is None  # one prompt: nothing to draw from


def test_the_turns_of_a_conversation_are_drawn_together() -> None:
    turns = [
        [replace(one, id=one.id + ("/turn-2" if turn == 2 else ""), turn=turn) for one in results_of("a", NOISY)]
        for turn in (1, 2)
    ]
    once, twice = (
        compare(found, seed=5)["scopes"]["math"]["lengths"]["a"] for found in (turns[0], turns[0] + turns[1])
    )
    assert once == pytest.approx(twice)  # twice the rounds, no further chance
