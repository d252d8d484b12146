"""When a metric of the validation rows has stopped to improve: pure numbers, equal on every rank."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Plateau:
    """The best value so far, at which step it was measured, and how many measurements ago."""

    best: float | None = None
    step: int = 0
    waited: int = 0

    def after(self, step: int, value: float, smaller: bool) -> "Plateau":
        """With the value of one more step; `smaller`: smaller is better. Equal or not finite ones improve nothing."""
        better = math.isfinite(value) and (self.best is None or (value < self.best if smaller else value > self.best))
        return Plateau(value, step) if better else Plateau(self.best, self.step, self.waited + 1)
