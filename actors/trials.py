"""What the trials of a sweep have in common."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.places import Places
from actors.task import Validation


@dataclass(frozen=True)
class Common:
    """What the trials of a sweep are given, so that none of them loads a target; the sweep's own process holds it."""

    stop: Any  # handle of the one StopActor of all trials
    places: Places  # of the trainers of all trials
    bigrams: Any  # reference to the target's `Bigrams`; None: no trial begins with them
    validation: Mapping[int, Validation]  # by the rows of one forward of all ranks
    targets: tuple[Any, ...]  # handles of SharedTarget; empty: trials read a cache
