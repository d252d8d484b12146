"""Replayed rounds: literals by hand, and what must hold for flat and for steep step rates."""

from dataclasses import astuple

import numpy as np
import pytest

from dspark.decoding.calibration import VerifiedRound
from dspark.decoding.schedule import StepRates
from dspark.decoding.simulate import Replayed, policies, replay

FLAT = StepRates((1,), (10.0,))
STEEP = StepRates(tuple(range(1, 200)), tuple(10.0 / tokens for tokens in range(1, 200)))


def recorded(count: int, slots: int = 4, seed: int = 0) -> tuple[list[VerifiedRound], list[list[float]]]:
    """Rounds whose drafts are accepted with the probability that their confidences say."""
    rng = np.random.default_rng(seed)
    confidences = rng.uniform(0.2, 0.95, (count, slots))
    accepted = np.cumprod(rng.random((count, slots)) < confidences, axis=1).sum(axis=1).tolist()
    return [VerifiedRound((0.0,) * slots, number, number + 1) for number in accepted], confidences.tolist()


def replayed(name: str, count: int, requests: int, rates: StepRates, threshold: float = 0.5) -> Replayed:
    rounds, confidences = recorded(count)
    return replay(rounds, confidences, name, policies(rates, threshold)[name], requests, rates)


def numbers(one: Replayed) -> tuple[float, ...]:
    """Requests, tokens per second, acceptance length, drafts verified, steps per second."""
    return astuple(one)[1:]


def test_two_rounds_by_hand() -> None:
    rounds, confidences = [VerifiedRound((), 2, 3), VerifiedRound((), 0, 1)], [(0.9, 0.4), (0.8, 0.7)]
    rates = StepRates((1, 2, 3), (10.0, 5.0, 4.0))
    ways = policies(rates, threshold=0.75)
    fixed = replay(rounds, confidences, "fixed", ways["fixed"], 1, rates)
    assert numbers(fixed) == pytest.approx((1, 4 / (2 / 4), 2.0, 2.0, 4.0))
    # One slot of each is sure enough: 2 tokens of the first round instead of 3, and passes of 2 tokens.
    sure = replay(rounds, confidences, "threshold 0.75", ways["threshold 0.75"], 1, rates)
    assert numbers(sure) == pytest.approx((1, 3 / (2 / 5), 1.5, 1.0, 5.0))
    plain = replay(rounds, confidences, "plain", ways["plain"], 2, rates)
    assert numbers(plain) == pytest.approx((2, 2 * 5.0, 1.0, 0.0, 5.0))


def test_a_round_that_a_stop_token_ended_keeps_no_more_than_it_did() -> None:
    rounds, confidences = [VerifiedRound((), 3, 2)], [(0.9, 0.9, 0.9)]
    fixed = replay(rounds, confidences, "fixed", policies(FLAT, 0.5)["fixed"], 1, FLAT)
    assert fixed.acceptance_length == 2.0
    plain = replay(rounds, confidences, "plain", policies(FLAT, 0.5)["plain"], 1, FLAT)
    assert plain.acceptance_length == 1.0


def test_fixed_lengths_at_one_request_give_acceptance_length_times_rate() -> None:
    rounds, _ = recorded(300)
    fixed = replayed("fixed", 300, 1, STEEP)
    assert fixed.acceptance_length == pytest.approx(sum(one.kept for one in rounds) / 300)
    assert fixed.tokens_per_second == pytest.approx(fixed.acceptance_length * STEEP.at(5))


@pytest.mark.parametrize("requests", [1, 4, 30])
def test_every_round_is_replayed_once_whatever_the_load(requests: int) -> None:
    rounds, _ = recorded(60)
    fixed = replayed("fixed", 60, requests, FLAT)
    assert fixed.acceptance_length == pytest.approx(sum(one.kept for one in rounds) / 60)
    assert fixed.tokens_per_second == pytest.approx(requests * 10 * fixed.acceptance_length)


@pytest.mark.parametrize("requests", [1, 7, 64])
def test_where_a_pass_costs_the_same_whatever_it_holds_the_scheduler_verifies_all(requests: int) -> None:
    scheduled, fixed = (replayed(name, 100, requests, FLAT) for name in ("scheduler", "fixed"))
    assert scheduled.tokens_per_second == pytest.approx(fixed.tokens_per_second)
    assert scheduled.verified == fixed.verified == 4


@pytest.mark.parametrize("requests", [1, 8, 32])
def test_where_every_token_costs_its_share_the_scheduler_beats_fixed_lengths(requests: int) -> None:
    scheduled, fixed, plain = (replayed(name, 400, requests, STEEP) for name in ("scheduler", "fixed", "plain"))
    assert scheduled.tokens_per_second > 1.3 * fixed.tokens_per_second
    assert scheduled.tokens_per_second >= plain.tokens_per_second - 1e-9
    assert scheduled.verified < fixed.verified


def test_the_scheduler_verifies_less_the_more_requests_share_the_machine() -> None:
    # Passes of up to 40 tokens cost the same; beyond, time grows with the tokens.
    rates = StepRates((40, 400), (10.0, 1.0))
    verified = [replayed("scheduler", 400, requests, rates).verified for requests in (4, 16, 36)]
    assert verified[0] == 4 > verified[1] > verified[2] > 0


def test_a_table_of_loads_beyond_the_recorded_rounds_uses_them_again() -> None:
    assert replayed("fixed", 3, 7, FLAT).requests == 7
    assert replayed("fixed", 3, 3, FLAT).acceptance_length == pytest.approx(
        replayed("fixed", 3, 6, FLAT).acceptance_length
    )
