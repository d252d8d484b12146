"""How many of its drafts a request sends through the target: a policy, and what the settings say about it.

A `Fixed` number, the prefix of which every slot reaches a `Threshold` of confidence, or what the machine's step rates
make worth while (`Scheduled`). Each is a value; the rules themselves stand in `dspark.decoding.schedule`. A confidence
is sigmoid(logit / temperature of its slot). Shape suffixes: R requests, K slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from dspark.decoding.calibration_file import load_calibration
from dspark.decoding.schedule import StepRates, confident_length, scheduled_lengths
from dspark.errors import InputError

PolicyName = Literal["fixed", "threshold", "scheduled"]


@dataclass(frozen=True)
class Fixed:
    """At most `slots` drafts are made and verified; None: as many as the drafter's block has."""

    slots: int | None = None


@dataclass(frozen=True)
class Threshold:
    """The longest prefix of the drafts in which every confidence is at least this."""

    confidence: float


@dataclass(frozen=True)
class Scheduled:
    """What yields most tokens per second over the whole batch, at these step rates of the target."""

    rates: StepRates


Policy = Fixed | Threshold | Scheduled
WHOLE_BLOCK = Fixed()


def admitted(policy: Policy, drafted: Sequence[int], confidences: Sequence[Sequence[float]]) -> list[int]:
    """Drafts of each request to verify, of `drafted` ones with these confidences."""
    match policy:
        case Fixed():
            return list(drafted)
        case Threshold(threshold):
            return [confident_length(row, threshold) for row in confidences]
        case Scheduled(rates):
            return scheduled_lengths(confidences, rates)


def calibrated(logits_RK: Tensor, temperatures: Sequence[float] | None) -> Tensor:
    """Confidences [R, K] of slots 0..K-1 from the head's logits."""
    if temperatures is None:
        return logits_RK.sigmoid()
    divisors_K = torch.tensor(temperatures[: logits_RK.shape[1]], dtype=logits_RK.dtype, device=logits_RK.device)
    return (logits_RK / divisors_K).sigmoid()


def check_policy(policy: Policy, temperatures: Sequence[float] | None, block: int | None, confident: bool) -> None:
    """
    Args:
        policy: what is asked for.
        temperatures: one per slot, or None.
        block: slots that the drafter has; None: there is no drafter.
        confident: whether the drafter has a confidence head.

    Raises:
        InputError: the drafter cannot serve the policy, or the temperatures are not those of its slots.
    """
    if isinstance(policy, Fixed) and policy.slots is not None and not 1 <= policy.slots <= (block or 1):
        raise InputError(
            f"policy fixed with {policy.slots} slots: the drafter has {block or 'none'}, so choose 1 to {block or 1}, "
            "or leave the number out"
        )
    if isinstance(policy, Threshold) and not 0 <= policy.confidence <= 1:
        raise InputError(f"threshold {policy.confidence}: a confidence lies between 0 and 1")
    if block is None:
        return
    if not confident and not isinstance(policy, Fixed):
        raise InputError(
            f"policy {type(policy).__name__.lower()} needs confidences, and this drafter has no confidence head: use "
            "the policy fixed, or train a drafter with `drafter.confidence`"
        )
    if temperatures is not None and len(temperatures) < block:
        raise InputError(
            f"the calibration has {len(temperatures)} temperatures, the drafter {block} slots: calibrate this drafter"
        )


def choose_policy(
    name: PolicyName, slots: int | None, threshold: float | None, calibration: Path | None
) -> tuple[Policy, tuple[float, ...] | None]:
    """The policy that settings name, and the confidence temperatures of the calibration file.

    Raises:
        InputError: a policy lacks what it needs, or is given what it does not read.
    """
    found = load_calibration(calibration) if calibration is not None else None
    temperatures = None if found is None else found.temperatures
    if slots is not None and name != "fixed":
        raise InputError(f"a number of slots belongs to the policy fixed, not to {name}: leave one of the two out")
    if threshold is not None and name != "threshold":
        raise InputError(f"a threshold belongs to the policy threshold, not to {name}: leave one of the two out")
    match name:
        case "fixed":
            return Fixed(slots), temperatures
        case "threshold" if threshold is not None:
            return Threshold(threshold), temperatures
        case "scheduled" if found is not None and found.rates is not None:
            return Scheduled(found.rates), temperatures
        case "threshold":
            raise InputError("policy threshold needs the confidence to reach: set a threshold between 0 and 1")
        case "scheduled":
            raise InputError(
                f"policy scheduled needs the target's step rates, and {calibration or 'no calibration file'} has none: "
                "measure them with `dspark calibrate --profile` and name the file it writes"
            )
