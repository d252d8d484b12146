"""When a validation metric has stopped to improve."""

import math

from dspark.training.plateau import Plateau


def test_what_is_equal_or_not_finite_improves_nothing_not_even_as_the_first_value() -> None:
    lost = Plateau().after(1, math.nan, smaller=True)
    assert lost == Plateau(None, 0, 1)
    found = lost.after(2, 3.0, smaller=True)
    assert found == Plateau(3.0, 2, 0)
    for value in (3.0, 3.5, math.nan, -math.inf):
        assert found.after(3, value, smaller=True) == Plateau(3.0, 2, 1)
    assert found.after(3, 2.5, smaller=True) == Plateau(2.5, 3, 0)
    assert found.after(3, 3.5, smaller=False) == Plateau(3.5, 3, 0)
