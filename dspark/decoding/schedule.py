"""How many draft tokens of each request the target verifies: by confidence alone, or by what the machine can take.

A decision about slot j reads confidences of slots up to j, which know only tokens before slot j, so decoding stays
lossless (design section 6). Shape suffixes: R requests, K slots.
"""

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from dspark.errors import InputError


@dataclass(frozen=True)
class StepRates:
    """Target passes per second by the number of tokens in one pass, measured on the running target.

    The time of a pass, the inverse of its rate, is linear between two measured numbers and goes on beyond the last one
    as it rose before it; fewer tokens than the first number take as long as that.
    """

    tokens: tuple[int, ...]  # rising
    per_second: tuple[float, ...]

    def __post_init__(self) -> None:
        """
        Raises:
            InputError: no table of positive rates at rising numbers of tokens.
        """
        rising = all(low < high for low, high in zip(self.tokens, self.tokens[1:], strict=False))
        sound = 0 < len(self.tokens) == len(self.per_second) and self.tokens[0] > 0 and min(self.per_second) > 0
        if not (rising and sound):
            raise InputError(
                f"a table of step rates needs rising token counts and a positive rate for each, found {self.tokens} "
                f"and {self.per_second}: measure it with `dspark calibrate --profile`"
            )

    def at(self, tokens: int) -> float:
        """Passes per second with `tokens` tokens in each."""
        right = bisect_left(self.tokens, tokens)
        if right == 0 or len(self.tokens) == 1:
            return self.per_second[0]
        beyond = right == len(self.tokens)
        right -= beyond
        low, high = self.tokens[right - 1], self.tokens[right]
        before, after = 1 / self.per_second[right - 1], 1 / self.per_second[right]
        # Noise may make a larger pass the faster one: beyond the table, more tokens would be more than free.
        rise = max(0.0, after - before) if beyond else after - before
        return 1 / (after + rise * (tokens - high) / (high - low))


def confident_length(confidences: Sequence[float], threshold: float) -> int:
    """Slots of the longest prefix in which every confidence reaches the threshold."""
    return sum(1 for _ in takewhile(lambda confidence: confidence >= threshold, confidences))


def scheduled_lengths(confidences_RK: Sequence[Sequence[float]], rates: StepRates) -> list[int]:
    """Slots of each request to verify so that the batch yields most tokens per second; rows may differ in length.

    Slots are visited by falling survival, the product of a request's confidences so far; the first that does not raise
    the expected tokens per second ends the search and is not admitted. That early end, instead of the best of all ends,
    is what keeps decoding lossless (design section 6).
    """
    admitted = [0] * len(confidences_RK)
    tokens, expected = len(confidences_RK), float(len(confidences_RK))
    best = expected * rates.at(tokens) if tokens else 0.0
    # Survival never rises within a request, so each has one candidate at a time. Ties: the smaller slot, then request.
    waiting = [(-row[0], 0, request) for request, row in enumerate(confidences_RK) if len(row)]
    heapq.heapify(waiting)
    while waiting:
        negative, slot, request = heapq.heappop(waiting)
        tokens, expected = tokens + 1, expected - negative
        speed = expected * rates.at(tokens)
        if speed <= best:
            break
        best = speed
        admitted[request] = slot + 1
        row = confidences_RK[request]
        if slot + 1 < len(row):
            heapq.heappush(waiting, (negative * row[slot + 1], slot + 1, request))
    return admitted
