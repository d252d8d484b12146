"""Temperatures and errors: literals by hand, and data whose right temperatures are known."""

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.decoding.calibration import (
    GRID,
    Floats,
    Verified,
    VerifiedRound,
    calibration_error,
    fit_temperatures,
    half_of,
    measure,
    reliability,
    survival,
    verified_rounds,
)

MANY = 30_000  # rounds enough for a temperature to be found within a tenth


def drawn(scale: float, slots: int, rounds: int = MANY, seed: int = 0) -> Verified:
    """Rounds whose slots are accepted with probability sigmoid(logit / scale), if those before them are."""
    rng = np.random.default_rng(seed)
    logits_NK = rng.normal(1.0, 1.5, (rounds, slots))
    held_NK = np.cumprod(rng.random((rounds, slots)) < 1 / (1 + np.exp(-logits_NK)), axis=1)
    return Verified(scale * logits_NK, np.full(rounds, slots), held_NK.sum(axis=1))


def logit(probability: float) -> float:
    return float(np.log(probability / (1 - probability)))


def test_the_error_is_the_distance_in_each_bin_weighted_by_its_rounds() -> None:
    predicted = np.array([0.1, 0.3, 0.8, 1.0])
    outcome = np.array([False, True, True, True])
    # Lower half: mean 0.2 against 1/2. Upper half: 0.9 against 1.
    assert calibration_error(predicted, outcome, bins=2) == pytest.approx((2 * 0.3 + 2 * 0.1) / 4)
    lower, upper = reliability(predicted, outcome, bins=2)
    assert astuple(lower) == pytest.approx((0.0, 0.5, 2, 0.2, 0.5))
    assert astuple(upper) == pytest.approx((0.5, 1.0, 2, 0.9, 1.0))


def test_empty_bins_are_left_out_and_a_certain_prediction_has_one() -> None:
    bins = reliability(np.array([1.0, 0.99]), np.array([True, True]), bins=10)
    assert [(one.low, one.rounds) for one in bins] == [(0.9, 2)]


def test_survival_is_the_product_of_what_the_slots_say() -> None:
    logits = np.array([[logit(0.8), 2 * logit(0.5), 3 * logit(0.9)]])
    assert survival(logits, (1.0, 2.0, 3.0)).tolist() == [pytest.approx([0.8, 0.4, 0.36])]


def test_rounds_become_arrays_in_which_slots_that_were_not_verified_say_nothing() -> None:
    rounds = [VerifiedRound((1.0, 2.0, 3.0), 1, 2), VerifiedRound((4.0,), 1, 1), VerifiedRound((), 0, 1)]
    verified = verified_rounds(rounds, slots=3)
    assert verified.logits_NK.tolist() == [[1.0, 2.0, 3.0], [4.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert [verified.of(slot).tolist() for slot in (0, 1)] == [[True, True, False], [True, False, False]]
    assert verified.outcome(0).tolist() == [True, True, False]
    assert [slot.rounds for slot in measure(verified, (1, 1, 1), bins=5)] == [2, 1, 1]


def test_what_is_calibrated_keeps_temperatures_near_one() -> None:
    fit = fit_temperatures(drawn(1.0, slots=3), bins=15, min_rounds=100)
    assert fit.temperatures == pytest.approx((1.0, 1.0, 1.0), rel=0.12)
    assert fit.fitted == (True, True, True)
    assert fit.rounds == (MANY, MANY, MANY)


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_scaled_logits_get_the_scale_as_temperature_and_small_errors(scale: float) -> None:
    seen, unseen = drawn(scale, slots=3), drawn(scale, slots=3, seed=1)
    fit = fit_temperatures(seen, bins=15, min_rounds=100)
    assert fit.temperatures == pytest.approx((scale, scale, scale), rel=0.12)
    before = measure(unseen, (1.0,) * 3, bins=15)
    after = measure(unseen, fit.temperatures, bins=15)
    assert all(old.ece > 0.03 > 2 * new.ece for old, new in zip(before, after, strict=True) if old.ece and new.ece)
    assert all(old.brier > new.brier for old, new in zip(before, after, strict=True) if old.brier and new.brier)
    assert before[0].auroc == pytest.approx(after[0].auroc)  # of one slot a temperature keeps the order


@settings(max_examples=15)
@given(st.integers(0, 1000), st.floats(0.3, 3.0), st.integers(40, 200))
def test_on_the_rounds_of_the_fit_no_temperature_is_worse_than_one(seed: int, scale: float, rounds: int) -> None:
    verified = drawn(scale, slots=2, rounds=rounds, seed=seed)
    first, second = fit_temperatures(verified, bins=10, min_rounds=1).temperatures
    fitted, kept, none = (
        [slot.ece or 0.0 for slot in measure(verified, temperatures, bins=10)]
        for temperatures in ((first, second), (first, 1.0), (1.0, 1.0))
    )
    assert fitted[0] <= none[0] + 1e-12
    assert fitted[1] <= kept[1] + 1e-12


def test_a_later_slot_is_fitted_on_top_of_the_earlier_ones() -> None:
    verified = drawn(1.0, slots=2)
    scaled = Verified(verified.logits_NK * [4.0, 0.5], verified.offered_N, verified.accepted_N)
    assert fit_temperatures(scaled, bins=15, min_rounds=100).temperatures == pytest.approx((4.0, 0.5), rel=0.15)


def test_a_slot_with_too_few_rounds_keeps_temperature_one_and_is_said_so() -> None:
    whole = drawn(2.0, slots=2, rounds=1000)
    cut = Verified(whole.logits_NK, np.where(np.arange(1000) < 99, 2, 1), np.minimum(whole.accepted_N, 1))
    fit = fit_temperatures(cut, bins=15, min_rounds=100)
    assert (fit.fitted, fit.rounds, fit.temperatures[1]) == ((True, False), (1000, 99), 1.0)
    assert fit.temperatures[0] > 1.3


def test_rounds_that_did_not_verify_a_slot_do_not_move_its_temperature() -> None:
    drafts, half = drawn(2.0, slots=1, rounds=4000), np.arange(4000) < 2000
    # Slot 0 is certain at any temperature. Where slot 1 was not verified it holds a bold logit, and is not accepted.
    logits: Floats = np.stack((np.full(4000, 1e4), np.where(half, drafts.logits_NK[:, 0], 9.0)), axis=1)
    whole = Verified(logits, np.where(half, 2, 1), np.where(half, 1 + drafts.accepted_N, 1))
    alone = Verified(logits[half], whole.offered_N[half], whole.accepted_N[half])
    fits = [fit_temperatures(verified, bins=15, min_rounds=100).temperatures for verified in (whole, alone)]
    assert fits[0] == fits[1] == pytest.approx((1.0, 2.0), rel=0.3)
    assert measure(whole, fits[0], bins=15)[1] == measure(alone, fits[1], bins=15)[1]


def test_ranking_is_not_measured_where_all_rounds_ended_alike() -> None:
    logits, ends = np.array([[1.0], [2.0]]), np.array([1, 1])
    (quality,) = measure(Verified(logits, ends, ends), (1.0,), bins=5)
    assert quality.auroc is None
    assert quality.accepted == 1.0
    (nothing,) = measure(Verified(logits, 0 * ends, 0 * ends), (1.0,), bins=5)
    assert (nothing.rounds, nothing.ece, nothing.bins) == (0, None, ())


def test_ranking_and_brier_score_of_two_rounds_by_hand() -> None:
    logits = np.array([[logit(0.8)], [logit(0.4)]])
    right, wrong = (Verified(logits, np.array([1, 1]), np.array(accepted)) for accepted in ([1, 0], [0, 1]))
    assert measure(right, (1.0,), 5)[0].brier == pytest.approx((0.2**2 + 0.4**2) / 2)
    assert (measure(right, (1.0,), 5)[0].auroc, measure(wrong, (1.0,), 5)[0].auroc) == (1.0, 0.0)


def test_the_grid_holds_one_exactly() -> None:
    assert 1.0 in GRID
    assert (GRID[0], GRID[-1]) == pytest.approx((0.1, 10.0))


def test_the_half_of_a_prompt_depends_on_it_alone_and_both_halves_are_used() -> None:
    halves = [half_of([number, 7]) for number in range(200)]
    assert 70 < halves.count("fit") < 130
    assert half_of([3, 7]) == halves[3]
    assert {half_of([1]), half_of([256]), half_of([1, 0])} <= {"fit", "report"}
