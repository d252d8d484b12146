"""Bytes in the object stores of the cluster, as their own nodes count them."""

from dataclasses import dataclass

import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address


@dataclass(frozen=True)
class StoreUse:
    """All nodes together.

    Held are objects that someone refers to. A store has more in use: it deletes those that it may forget about once a
    second, or as soon as it needs their place. Spilled is whatever was since the start, also what has been read back.
    """

    held: int
    spilled: int


def store_use() -> StoreUse:
    """What the stores hold now. Ray has no public call for it; its own `ray memory` asks the same way."""
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    stats = get_memory_info_reply(state).store_stats
    return StoreUse(int(stats.object_store_bytes_primary_copy), int(stats.spilled_bytes_total))
