"""What the confidence head's numbers are worth: thresholds replayed on recorded rounds, and its reliability.

Pure functions of round records {proposed, accepted, kept, confidences}; confidences are those of all drafted slots.
Rounds without any are left out.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

from dspark.decoding.schedule import confident_length
from dspark.evaluation.metrics import Record

THRESHOLDS = tuple(step / 20 for step in range(20))
BINS = 10

Pair = tuple[float, bool]  # prediction, and whether it came true


def confidence_numbers(rounds: Sequence[Record]) -> dict[str, Any] | None:
    """{"thresholds": ..., "slots": ...} of a drafter with a confidence head; None without one."""
    scored = [record for record in rounds if record["confidences"]]
    if not scored:
        return None
    return {"thresholds": threshold_sweep(scored), "slots": reliability(scored)}


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


def reliability(rounds: Sequence[Record]) -> list[dict[str, Any]]:
    """By slot: the bins and the expected calibration error of its confidence and of its survival."""
    slots = max(record["proposed"] for record in rounds)
    found = []
    for k in range(slots):
        proposed = [record for record in rounds if record["proposed"] > k]
        reached = [record for record in proposed if record["accepted"] >= k]
        confidence = [(record["confidences"][k], record["accepted"] > k) for record in reached]
        survival = [(_survival(record, k), record["accepted"] > k) for record in proposed]
        found.append({"slot": k, "confidence": _calibration(confidence), "survival": _calibration(survival)})
    return found


def _survival(record: Record, k: int) -> float:
    product: float = list(accumulate(record["confidences"][: k + 1], mul))[-1]
    return product


def _calibration(pairs: Sequence[Pair]) -> dict[str, Any]:
    bins: list[list[Pair]] = [[] for _ in range(BINS)]
    for pair in pairs:
        bins[min(int(pair[0] * BINS), BINS - 1)].append(pair)
    filled = [_bin(chosen) for chosen in bins if chosen]
    distance = sum(one["rounds"] * abs(one["predicted"] - one["accepted"]) for one in filled)
    return {"rounds": len(pairs), "error": distance / len(pairs) if pairs else None, "bins": filled}


def _bin(pairs: Sequence[Pair]) -> dict[str, float]:
    return {
        "rounds": len(pairs),
        "predicted": sum(prediction for prediction, _ in pairs) / len(pairs),
        "accepted": sum(accepted for _, accepted in pairs) / len(pairs),
    }
