"""Tokens per second at any load, from recorded rounds and measured step rates.

recorded rounds -> R streams that walk through them -> per step a policy's lengths -> tokens kept and time of one pass

A recorded round was verified in full, so it says what any shorter verification would have kept. The rounds are dealt to
the streams as if they were exchangeable: a shorter verification would have led to another next round, which nobody
recorded. The time of a step is that of the target's pass; drafting is not in it. Shape suffixes: R requests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dspark.decoding.calibration import VerifiedRound
from dspark.decoding.schedule import StepRates, confident_length, scheduled_lengths

# From the confidences of each request's drafts to the number of them to verify.
Choose = Callable[[Sequence[Sequence[float]]], Sequence[int]]


@dataclass(frozen=True)
class Replayed:
    """One policy at one load: how the recorded rounds would have gone."""

    policy: str
    requests: int  # decoded together
    tokens_per_second: float  # of all requests
    acceptance_length: float  # tokens kept per round and request
    verified: float  # draft tokens verified per round and request
    steps_per_second: float


def policies(rates: StepRates, threshold: float) -> Mapping[str, Choose]:
    """The three ways to choose verification lengths, and plain decoding, which verifies none."""
    return {
        "plain": lambda rows: [0] * len(rows),
        "fixed": lambda rows: [len(row) for row in rows],
        f"threshold {threshold:g}": lambda rows: [confident_length(row, threshold) for row in rows],
        "scheduler": lambda rows: scheduled_lengths(rows, rates),
    }


def replay(
    rounds: Sequence[VerifiedRound],
    confidences: Sequence[Sequence[float]],
    name: str,
    choose: Choose,
    requests: int,
    rates: StepRates,
) -> Replayed:
    """Replays `rounds` with `requests` streams at a time.

    `confidences[n]` belongs to the drafts of round n. Every round is replayed once, by the stream that reaches it;
    where the streams do not divide the rounds, some of the first are replayed again.
    """
    assert rounds and requests > 0, "nothing to replay"
    steps = -(-len(rounds) // requests)
    kept = verified = 0
    seconds = 0.0
    for step in range(steps):
        played = [(stream * steps + step) % len(rounds) for stream in range(requests)]
        lengths = choose([confidences[number] for number in played])
        kept += sum(_kept(rounds[number], length) for number, length in zip(played, lengths, strict=True))
        verified += sum(lengths)
        seconds += 1 / rates.at(requests + sum(lengths))
    return Replayed(
        policy=name,
        requests=requests,
        tokens_per_second=kept / seconds,
        acceptance_length=kept / (steps * requests),
        verified=verified / (steps * requests),
        steps_per_second=steps / seconds,
    )


def _kept(recorded: VerifiedRound, verified: int) -> int:
    """Tokens that a round keeps with so many drafts verified: fewer accepted, or fewer up to its stop token."""
    return min(recorded.kept, min(recorded.accepted, verified) + 1)
