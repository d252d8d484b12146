"""Rows that are waited for while targets may be gone for good.

Ray Data restarts an actor for ever, and Ray lets one that fits nowhere wait for a node that may never join. Whoever
takes rows from a pool looks up meanwhile, here, whether a node is left that could hold a target.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty, Queue
from typing import Any, TypeVar

import ray

from dspark.config import Settings
from dspark.errors import InputError

T = TypeVar("T")
_LOOK_S = 2.0
# A node that comes back, or that an autoscaler puts in the place of a lost one, is given this time to join.
PATIENCE_S = 30.0


def attended(rows: Iterator[T], look: Callable[[], None]) -> Iterator[T]:
    """The same rows; as long as none comes, `look` is called every other second and may end the wait by raising."""
    arrived: Queue[tuple[T | None, BaseException | None]] = Queue(maxsize=1)

    def fetch() -> None:
        try:
            for row in rows:
                arrived.put((row, None))
        except BaseException as error:  # handed on to whoever waits
            arrived.put((None, error))
        else:
            arrived.put((None, StopIteration()))

    # A thread that waits for rows that never come must not keep its process.
    threading.Thread(target=fetch, name="rows", daemon=True).start()
    while True:
        try:
            row, error = arrived.get(timeout=_LOOK_S)
        except Empty:
            look()
            continue
        if isinstance(error, StopIteration):
            return
        if error is not None:
            raise error
        assert row is not None
        yield row
        del row  # or the last row would stay while the next one is waited for


class TargetWatch:
    """Raises once no node of the cluster could hold a target for `PATIENCE_S`, as long as it is asked now and then."""

    def __init__(self, settings: Settings) -> None:
        pool = settings.targets
        self.needed = {name: count for name, count in (("CPU", pool.cpus), ("GPU", pool.gpus)) if count}
        self.labels = settings.ray.target_labels
        self.since: float | None = None

    def __call__(self) -> None:
        """Looks once.

        Raises:
            InputError: what a target needs, and what the nodes that are left have.
        """
        nodes = [node for node in ray.nodes() if node["Alive"]]
        if any(could_hold(node, self.needed, self.labels) for node in nodes):
            self.since = None
            return
        self.since = self.since or time.monotonic()
        if time.monotonic() - self.since >= PATIENCE_S:
            raise InputError(lost_targets(nodes, self.needed, self.labels))


def could_hold(node: Mapping[str, Any], needed: Mapping[str, float], labels: Mapping[str, str]) -> bool:
    """Whether a node as `ray.nodes()` lists it has these labels and, in use or not, these resources."""
    found, own = node["Resources"], node.get("Labels", {})
    return all(found.get(name, 0.0) >= count for name, count in needed.items()) and all(
        own.get(key) == value for key, value in labels.items()
    )


def lost_targets(nodes: Sequence[Mapping[str, Any]], needed: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """What to tell when no node is left for a target."""
    with_labels = [node for node in nodes if could_hold(node, {}, labels)]
    counts = ", ".join(f"{count:g} logical {name}s" for name, count in needed.items()) or "no resources"
    where = f" on a node with labels {dict(labels)}" if labels else ""
    return (
        f"no target is left and none can be started: it needs {counts}{where}, and of the {len(nodes)} nodes that are "
        f"alive {len(with_labels)} have these labels and none has room: join such a node, or change targets.cpus, "
        "targets.gpus or ray.target_labels, and go on with --resume"
    )
