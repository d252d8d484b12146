"""What Ray passes on unread is imported where it works, and nowhere before.

    driver -> Ray Train's controller -> dataset manager -> split coordinator -> actors
                                     └-> trainer ranks

Each of these is a process that unpickles what it hands to the next, one after the other. A class or a function of a
module with torch, transformers or DeepSpeed in it would have every one of them import those first, which is some
seconds of a processor each time. So they travel as names, and what they are given as a reference. (Of the four, torch
itself comes to the controller alone, with Ray Train's own configuration of it.)
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pyarrow as pa
import ray


class LateActor:
    """An actor of Ray Data by its module, its name, and a reference to the tuple of its arguments."""

    def __init__(self, module: str, name: str, arguments: Any) -> None:
        self.actor = getattr(import_module(module), name)(*ray.get(arguments))

    def __call__(self, window: pa.Table) -> Iterator[pa.Table]:
        """The tables that it makes of one."""
        yield from self.actor(window)


def late(name: str) -> type[LateActor]:
    """A class of that name, which Ray shows in its lists and in the titles of processes."""
    return type(name, (LateActor,), {})


def late_rank(config: dict[str, Any]) -> None:
    """`actors.trainer.train_rank` for a reference to its task."""
    from actors.trainer import train_rank

    train_rank(ray.get(config["task"]))
