"""What the confidence head's numbers are worth, and temperatures that make them probabilities.

rounds with every slot verified -> logits and outcomes by slot -> one temperature per slot, left to right -> errors of
the product of sigmoid(logit / temperature) over the slots so far, before and after

The outcome of slot j is whether the target's test accepted it and all slots before it, which is what that product
predicts. Pure functions on arrays. Shape suffixes: N rounds, K slots of a block.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import brier_score_loss, roc_auc_score

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Half = Literal["fit", "report"]

# Temperatures that are tried: from 0.1 to 10 by equal factors, the middle one exactly 1.
GRID = tuple(10 ** (step / 100) for step in range(-100, 101))


@dataclass(frozen=True)
class VerifiedRound:
    """A round of which the target verified every draft: one confidence logit for each."""

    logits: tuple[float, ...]
    accepted: int
    kept: int  # accepted + 1, fewer where a stop id ended the text


@dataclass(frozen=True)
class Verified:
    """Rounds as arrays: confidence logits, slots that the target verified, and how many of these it accepted."""

    logits_NK: Floats  # 0 where the slot was not verified
    offered_N: NDArray[np.int64]
    accepted_N: NDArray[np.int64]

    @property
    def slots(self) -> int:
        """K."""
        return self.logits_NK.shape[1]

    def of(self, slot: int) -> Bools:
        """Which rounds [N] verified this slot; the others say nothing of it."""
        verified_N: Bools = self.offered_N > slot
        return verified_N

    def outcome(self, slot: int) -> Bools:
        """Which rounds [N] accepted this slot and all before it."""
        accepted_N: Bools = self.accepted_N > slot
        return accepted_N


@dataclass(frozen=True)
class Fit:
    """One temperature per slot, the rounds that each could be fitted to, and whether these were enough."""

    temperatures: tuple[float, ...]
    rounds: tuple[int, ...]
    fitted: tuple[bool, ...]


@dataclass(frozen=True)
class Bin:
    """Rounds whose prediction lies in [low, high): their number, mean prediction, and share of accepted ones."""

    low: float
    high: float
    rounds: int
    predicted: float
    accepted: float


@dataclass(frozen=True)
class SlotQuality:
    """How well one slot's predictions agree with its outcomes; None where no round, or no two outcomes, were seen."""

    rounds: int
    predicted: float | None  # mean
    accepted: float | None  # share
    ece: float | None
    brier: float | None
    auroc: float | None
    bins: tuple[Bin, ...]


def half_of(prompt: Sequence[int]) -> Half:
    """Whether the rounds of a prompt are fitted to or reported on: by the hash of its tokens, so others move none."""
    digest = hashlib.sha256(np.asarray(prompt, dtype="<i8").tobytes()).digest()
    return "fit" if digest[0] % 2 else "report"


def verified_rounds(rounds: Sequence[VerifiedRound], slots: int) -> Verified:
    """Arrays of rounds of a drafter with blocks of `slots`."""
    logits_NK = np.zeros((len(rounds), slots))
    for row, one in enumerate(rounds):
        logits_NK[row, : len(one.logits)] = one.logits
    offered_N = np.array([len(one.logits) for one in rounds], dtype=np.int64)
    accepted_N = np.array([one.accepted for one in rounds], dtype=np.int64)
    return Verified(logits_NK, offered_N, accepted_N)


def confidences(logits: Sequence[float], temperatures: Sequence[float]) -> list[float]:
    """Of one round, the probability that each slot is accepted if those before it are."""
    values: list[float] = _sigmoid(np.asarray(logits) / np.asarray(temperatures[: len(logits)])).tolist()
    return values


def survival(logits_NK: Floats, temperatures: Sequence[float]) -> Floats:
    """Predicted probabilities [N, K] that slot k and all before it are accepted."""
    each_NK = _sigmoid(logits_NK / np.asarray(temperatures, np.float64))
    product_NK: Floats = np.cumprod(each_NK, axis=1, dtype=np.float64)
    return product_NK


def calibration_error(predicted_N: Floats, outcome_N: Bools, bins: int) -> float:
    """Expected calibration error: over equally wide bins, the mean distance of prediction and outcome, by rounds."""
    gaps = np.bincount(_places(predicted_N, bins), weights=predicted_N - outcome_N, minlength=bins)
    return float(np.abs(gaps).sum() / len(predicted_N))


def reliability(predicted_N: Floats, outcome_N: Bools, bins: int) -> tuple[Bin, ...]:
    """The bins that `calibration_error` sums over, without empty ones."""
    places_N = _places(predicted_N, bins)
    return tuple(
        Bin(
            low=place / bins,
            high=(place + 1) / bins,
            rounds=int((places_N == place).sum()),
            predicted=float(predicted_N[places_N == place].mean()),
            accepted=float(outcome_N[places_N == place].mean()),
        )
        for place in np.unique(places_N).tolist()
    )


def fit_temperatures(verified: Verified, bins: int, min_rounds: int) -> Fit:
    """Sequential temperature scaling: slot by slot, the temperature of GRID with the smallest calibration error.

    Those of the slots before stay as they were found. A slot that fewer than `min_rounds` rounds verified keeps 1. Of
    equally good ones the one nearest to 1 is taken, so no slot's error is above that of temperature 1 in its place.
    """
    before_N = np.ones(len(verified.offered_N))
    temperatures, counts, fitted = [], [], []
    for slot in range(verified.slots):
        chosen_N, logits_N = verified.of(slot), verified.logits_NK[:, slot]
        count = int(chosen_N.sum())
        temperature = 1.0
        if count >= min_rounds:
            outcome_N = verified.outcome(slot)[chosen_N]
            temperature = _best_temperature(before_N[chosen_N], logits_N[chosen_N], outcome_N, bins)
        before_N = before_N * _sigmoid(logits_N / temperature)
        temperatures.append(temperature)
        counts.append(count)
        fitted.append(count >= min_rounds)
    return Fit(tuple(temperatures), tuple(counts), tuple(fitted))


def _best_temperature(before_N: Floats, logits_N: Floats, outcome_N: Bools, bins: int) -> float:
    """Of GRID, the temperature of a slot whose earlier ones predict `before_N`."""

    def rank(temperature: float) -> tuple[float, float]:
        error = calibration_error(before_N * _sigmoid(logits_N / temperature), outcome_N, bins)
        return error, abs(math.log(temperature))

    return min(GRID, key=rank)


def measure(verified: Verified, temperatures: Sequence[float], bins: int) -> tuple[SlotQuality, ...]:
    """How good the predictions are with these temperatures, by slot, over the rounds that verified it."""
    survival_NK = survival(verified.logits_NK, temperatures)
    return tuple(
        _quality(survival_NK[verified.of(slot), slot], verified.outcome(slot)[verified.of(slot)], bins)
        for slot in range(verified.slots)
    )


def _quality(predicted_N: Floats, outcome_N: Bools, bins: int) -> SlotQuality:
    if not len(predicted_N):
        return SlotQuality(0, None, None, None, None, None, ())
    # Ranking has no meaning where all rounds ended alike.
    both = bool(outcome_N.any() and not outcome_N.all())
    return SlotQuality(
        rounds=len(predicted_N),
        predicted=float(predicted_N.mean()),
        accepted=float(outcome_N.mean()),
        ece=calibration_error(predicted_N, outcome_N, bins),
        brier=float(brier_score_loss(outcome_N, predicted_N, pos_label=True)),
        auroc=float(roc_auc_score(outcome_N, predicted_N)) if both else None,
        bins=reliability(predicted_N, outcome_N, bins),
    )


def _places(predicted_N: Floats, bins: int) -> NDArray[np.int64]:
    """Number of each prediction's bin; a prediction of 1 belongs to the last one."""
    places_N: NDArray[np.int64] = np.minimum((predicted_N * bins).astype(np.int64), bins - 1)
    return places_N


def _sigmoid(logits: Floats) -> Floats:
    """The logistic function, without overflow."""
    values: Floats = np.exp(-np.logaddexp(0.0, -logits))
    return values
