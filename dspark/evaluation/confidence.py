"""What the confidence head's numbers are worth: thresholds replayed on recorded rounds, and its reliability.

Pure functions of round records {proposed, accepted, kept, confidences}; confidences are those of all drafted slots.
Rounds without any are left out.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from dspark.decoding.calibration import calibration_error, reliability
from dspark.decoding.schedule import confident_length
from dspark.evaluation.metrics import Record

THRESHOLDS = tuple(step / 20 for step in range(20))
BINS = 10


def confidence_numbers(rounds: Sequence[Record]) -> dict[str, Any] | None:
    """{"thresholds": ..., "slots": ...} of a drafter with a confidence head; None without one."""
    scored = [record for record in rounds if record["confidences"]]
    if not scored:
        return None
    return {"thresholds": threshold_sweep(scored), "slots": reliability_by_slot(scored)}


def threshold_sweep(rounds: Sequence[Record]) -> list[dict[str, float]]:
    """What each of THRESHOLDS would have kept and verified per round; [] where a policy had cut the rounds already.

    Of a round that verified less than was drafted nobody knows what the rest would have given.
    """
    if any(record["proposed"] < len(record["confidences"]) for record in rounds):
        return []
    return [{"threshold": threshold, **_replayed(rounds, threshold)} for threshold in THRESHOLDS]


def _replayed(rounds: Sequence[Record], threshold: float) -> dict[str, float]:
    kept = verified = 0
    for record in rounds:
        length = confident_length(record["confidences"][: record["proposed"]], threshold)
        # What a stop id or the cap cut off stays cut off.
        kept += min(record["kept"], min(record["accepted"], length) + 1)
        verified += length + 1
    return {"kept": kept / len(rounds), "verified": verified / len(rounds), "rate": kept / verified}


def reliability_by_slot(rounds: Sequence[Record]) -> list[dict[str, Any]]:
    """By slot: the bins and the expected calibration error of its confidence and of its survival."""
    slots = max(record["proposed"] for record in rounds)
    found = []
    for k in range(slots):
        proposed = [record for record in rounds if record["proposed"] > k]
        reached = [record for record in proposed if record["accepted"] >= k]
        confidence = [record["confidences"][k] for record in reached]
        survival = [math.prod(record["confidences"][: k + 1]) for record in proposed]
        found.append(
            {"slot": k, "confidence": _errors(confidence, reached, k), "survival": _errors(survival, proposed, k)}
        )
    return found


def _errors(predicted: Sequence[float], rounds: Sequence[Record], k: int) -> dict[str, Any]:
    """Of predictions that these rounds accept slot k."""
    if not rounds:
        return {"rounds": 0, "error": None, "bins": []}
    predicted_N = np.array(predicted, np.float64)
    outcome_N = np.array([record["accepted"] > k for record in rounds])
    bins = [asdict(one) for one in reliability(predicted_N, outcome_N, BINS)]
    return {"rounds": len(rounds), "error": calibration_error(predicted_N, outcome_N, BINS), "bins": bins}
