"""Places of a sweep's runs, given back where Ray Train cannot do so.

Ray Train removes the placement group of a run that ends by itself. Where Ray Tune ends a run, or its process dies,
nobody is left to do it: Ray Train's own cleaner asks the dashboard, which a local Ray does not have.
"""

import time
from typing import Any

from ray.util.placement_group import remove_placement_group
from ray.util.queue import Queue

# A process that is being ended may ask for one more place.
_LATEST_S = 3.0
_LOOK_EVERY_S = 1.0


class Places:
    """The placement groups that trainers report to `queue`, by the name of their run."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.held: dict[str, list[Any]] = {}
        self.over: dict[str, float] = {}
        self.looked = 0.0

    def began(self, run: str) -> None:
        """Says that a run is there, perhaps once more."""
        self.over.pop(run, None)

    def ended(self, run: str) -> None:
        """Says that a run needs none any more."""
        self.over[run] = time.monotonic()

    def give_back(self) -> None:
        """Removes the groups of runs that ended some seconds ago; looks once a second, however often it is called."""
        now = time.monotonic()
        if now - self.looked < _LOOK_EVERY_S:
            return
        self.looked = now
        for run, group in self.queue.get_nowait_batch(self.queue.qsize()):
            self.held.setdefault(run, []).append(group)
        for run in [run for run, since in self.over.items() if now - since >= _LATEST_S]:
            for group in self.held.pop(run, []):
                remove_placement_group(group)  # of one that is gone it does nothing

    def settle(self) -> None:
        """Removes those of all runs that have ended, when the last one had its seconds."""
        if self.over:
            time.sleep(max(_LOOK_EVERY_S, max(self.over.values()) + _LATEST_S - time.monotonic()))
            self.give_back()
