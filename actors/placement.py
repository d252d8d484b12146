"""Rows that are waited for while targets may be gone for good.

Ray Data restarts an actor for ever, and gives its work to no other: what an actor owes is waited for while it has no
place, and Ray lets it wait for a node that may never join. So whoever takes rows from a pool looks up meanwhile what
places are left.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty, Queue
from typing import Any, TypeVar

import ray

from dspark.answering import PrepareSettings
from dspark.config import Settings
from dspark.errors import InputError
from dspark.learning import TrainSettings
from dspark.sections import EvaluateSettings, TargetPoolSettings

T = TypeVar("T")
# The sections whose actors hold a target each.
Pool = TargetPoolSettings | EvaluateSettings | PrepareSettings
_LOOK_S = 2.0
# A node that comes back, or that an autoscaler puts in the place of a lost one, is given this time to join.
_PATIENCE_S = 30.0
# What a window may take where a target has lost its place, before the stream is begun anew with those that are left.
_STALLED_S = 60.0
_MANY = 1_000_000


def attended(rows: Iterator[T], look: Callable[[float], None]) -> Iterator[T]:
    """The same rows. While none comes, `look` is called every other second with the seconds waited, and may raise."""
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
    since = time.monotonic()
    while True:
        try:
            row, error = arrived.get(timeout=_LOOK_S)
        except Empty:
            look(time.monotonic() - since)
            continue
        if isinstance(error, StopIteration):
            return
        if error is not None:
            raise error
        assert row is not None
        yield row
        del row  # or the last row would stay while the next one is waited for
        since = time.monotonic()


class TargetWatch:
    """Looks for the places of targets while rows of theirs are waited for."""

    def __init__(self, settings: Settings) -> None:
        pool = settings.targets
        self.needed = _needed(pool)
        self.labels = settings.ray.target_labels
        self.pool = pool.max_actors or pool.actors
        self.most = 0
        self.none_since: float | None = None

    def __call__(self, waited_s: float) -> None:
        """Looks once.

        Raises:
            InputError: no node could hold a target for a while; says what one needs.
            RuntimeError: a target lost its place and the rows that it owes do not come. A stream that is begun anew has
                other targets make them.
        """
        nodes = [node for node in ray.nodes() if node["Alive"]]
        places = min(self.pool, sum(places_on(node, self.needed, self.labels) for node in nodes))
        self.most = max(self.most, places)
        if places:
            self.none_since = None
            if places < self.most and waited_s >= _STALLED_S:
                raise RuntimeError(
                    f"{self.most - places} of {self.most} targets lost their place, with rows that they owe"
                )
            return
        self.none_since = self.none_since or time.monotonic()
        if time.monotonic() - self.none_since >= _PATIENCE_S:
            raise InputError(lost_targets(nodes, self.needed, self.labels))


def target_place(section: str, pool: Pool, labels: Mapping[str, str]) -> dict[str, Any]:
    """Options of Ray for an actor of this section: what it books, and on which nodes.

    Raises:
        InputError: no node could hold one, and Ray would let it wait for ever; says what one needs.
    """
    needed = _needed(pool)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if not any(places_on(node, needed, labels) for node in nodes):
        raise InputError(
            f"there is no place for an actor of {section}, which holds a target: {_unplaced(nodes, needed, labels)}: "
            f"join such a node, or change {section}.cpus, {section}.gpus or ray.target_labels"
        )
    return {"num_cpus": pool.cpus, "num_gpus": pool.gpus, "label_selector": dict(labels)}


def _needed(pool: Pool | TrainSettings) -> dict[str, float]:
    return {name: count for name, count in (("CPU", pool.cpus), ("GPU", pool.gpus)) if count}


def places_on(node: Mapping[str, Any], needed: Mapping[str, float], labels: Mapping[str, str]) -> int:
    """How many targets a node, as `ray.nodes()` lists it, could hold if nothing else were on it."""
    own, found = node.get("Labels", {}), node["Resources"]
    if any(own.get(key) != value for key, value in labels.items()):
        return 0
    return min((int(found.get(name, 0.0) // count) for name, count in needed.items()), default=_MANY)


def check_trainer_places(settings: Settings, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Refuses trainers that could never start. `nodes` are those of `ray.nodes()`.

    Raises:
        InputError: what they need, what the cluster has, and which setting needs less.
    """
    train, labels = settings.train, settings.ray.trainer_labels
    needed = _needed(train)
    places = sum(places_on(node, needed, labels) for node in nodes if node["Alive"])
    if places < train.workers:
        raise InputError(
            f"training with train.workers={train.workers} needs as many places with {train.cpus:g} logical CPUs and "
            f"{train.gpus:g} GPUs{f' on nodes with labels {labels}' if labels else ''}, the cluster has {places} "
            "and it would wait for ever: lower train.workers, or train.cpus or train.gpus, or join a larger cluster"
        )


def lost_targets(nodes: Sequence[Mapping[str, Any]], needed: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """What to tell when no node is left for a target."""
    return (
        f"no target is left and none can be started: {_unplaced(nodes, needed, labels)}: join such a node, or change "
        "targets.cpus, targets.gpus or ray.target_labels, and go on with --resume"
    )


def _unplaced(nodes: Sequence[Mapping[str, Any]], needed: Mapping[str, float], labels: Mapping[str, str]) -> str:
    counts = " and ".join(f"{count:g} logical {name}s" for name, count in needed.items()) or "no resources"
    labelled = [node for node in nodes if places_on(node, {}, labels)]
    where = f" on a node with labels {dict(labels)}" if labels else ""
    which = f", {len(labelled)} with these labels," if labels else ""
    return f"one needs {counts}{where}, and of the {len(nodes)} nodes that are alive{which} none has that"
