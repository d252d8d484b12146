"""Thresholds replayed on recorded rounds, and the reliability of confidences, counted by hand."""

from typing import Any

import pytest

from dspark.evaluation.confidence import THRESHOLDS, confidence_numbers, reliability_by_slot, threshold_sweep


def round_of(confidences: list[float], accepted: int, kept: int | None = None, proposed: int | None = None) -> Any:
    return {
        "proposed": len(confidences) if proposed is None else proposed,
        "accepted": accepted,
        "kept": accepted + 1 if kept is None else kept,
        "confidences": confidences,
    }


ROUNDS = [
    round_of([0.9, 0.4, 0.8], accepted=3),
    round_of([0.9, 0.8, 0.2], accepted=1),
    round_of([0.3, 0.9, 0.9], accepted=2, kept=2),  # a stop id ended it
]


def test_a_threshold_verifies_the_confident_prefix_and_keeps_what_was_accepted_in_it() -> None:
    sweep = {row["threshold"]: row for row in threshold_sweep(ROUNDS)}
    assert list(sweep) == list(THRESHOLDS)
    # 0: everything as recorded, 4 + 2 + 2 kept of 4 + 4 + 4.
    assert sweep[0.0] == pytest.approx({"threshold": 0.0, "kept": 8 / 3, "verified": 4, "rate": 8 / 12})
    # 0.5: prefixes of 1, 2 and 0 slots; 2 + 2 + 1 kept of 2 + 3 + 1.
    assert sweep[0.5] == pytest.approx({"threshold": 0.5, "kept": 5 / 3, "verified": 2, "rate": 5 / 6})
    # 0.35: 3, 2 and 0 slots.
    assert sweep[0.35] == pytest.approx({"threshold": 0.35, "kept": 7 / 3, "verified": 8 / 3, "rate": 7 / 8})


def test_rounds_that_a_policy_cut_are_not_replayed() -> None:
    for cut in (round_of([0.9, 0.2], accepted=1, proposed=1), round_of([0.1, 0.2], accepted=0, proposed=0)):
        found = confidence_numbers([*ROUNDS, cut])
        assert found is not None and found["thresholds"] == []
        assert [row["survival"]["rounds"] for row in found["slots"]] == [3 + cut["proposed"], 3, 3]


def test_reliability_counts_reached_slots_for_confidence_and_proposed_ones_for_survival() -> None:
    first, second, third = reliability_by_slot(ROUNDS)
    assert (first["confidence"]["rounds"], second["confidence"]["rounds"], third["confidence"]["rounds"]) == (3, 3, 2)
    # Slot 0: 0.9, 0.9 and 0.3, all accepted.
    assert first["confidence"]["error"] == pytest.approx((2 * 0.1 + 0.7) / 3)
    # Slot 2: reached by the first and the third round, which say 0.8 and 0.9; the second of them rejected it.
    assert third["confidence"]["bins"] == [
        {"low": 0.8, "high": 0.9, "rounds": 1, "predicted": 0.8, "accepted": 1.0},
        {"low": 0.9, "high": 1.0, "rounds": 1, "predicted": 0.9, "accepted": 0.0},
    ]  # fmt: skip
    # Survival of slot 1: 0.36, 0.72 and 0.27; accepted in the first and the third round.
    assert second["survival"]["rounds"] == 3
    assert second["survival"]["error"] == pytest.approx((0.64 + 0.72 + 0.73) / 3)


def test_a_drafter_without_the_head_has_no_such_numbers() -> None:
    assert confidence_numbers([round_of([], accepted=2, proposed=3)]) is None
    assert confidence_numbers([]) is None
