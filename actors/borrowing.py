"""A run's end of targets that many runs have in common (`actors.shared_target`). Without torch: it starts sooner."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import ray

from dspark.data.origin import Origin
from dspark.data.plan import Plan


class BorrowingActor:
    """Stands in a run's stream where a target would; `rows` and `plan` as for `TargetActor`."""

    def __init__(self, targets: tuple[Any, ...], origin: Origin, rows: Any, plan: Any) -> None:
        self.targets, self.origin = targets, origin
        self.rows: pa.Table = ray.get(rows)
        self.plan: Plan = ray.get(plan)

    def __call__(self, window: pa.Table) -> Iterator[pa.Table]:
        """The rows of one window, a table each."""
        first, last = window.column("start")[0].as_py(), window.column("stop")[0].as_py()
        wanted = self.rows.take(pa.array(self.plan.order[first:last]))
        target = self.targets[window.column("window")[0].as_py() % len(self.targets)]
        captured = ray.get(target.captured.remote(wanted, self.origin))
        yield from (captured.slice(row, 1) for row in range(captured.num_rows))
