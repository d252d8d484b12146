"""A cache in a Ray process: windows of plan rows in, captured tables out, as if a target had captured them."""

import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import ray

from dspark.data.cache_reader import CacheReader
from dspark.data.folder import Folder
from dspark.data.manifest import MANIFEST
from dspark.data.origin import Origin, fault_table
from dspark.data.plan import Plan
from dspark.errors import InputError

# All shards are there when a reader is first asked; to complete the cache is to join their parts of the ledger.
_WAIT_S, _LOOK_S = 1800.0, 0.5


class CacheActor:
    """One reader of one cache, which may be about to be completed by the driver; `rows` and `plan` as for a target."""

    def __init__(self, address: str, origin: Origin, rows: Any, plan: Any) -> None:
        self.address, self.origin = address, origin
        self.sample_ids: pa.ChunkedArray = ray.get(rows).column("sample_id")
        self.plan: Plan = ray.get(plan)
        self.reader: CacheReader | None = None

    def __call__(self, window: pa.Table) -> Iterator[pa.Table]:
        """The rows of one window, a table each."""
        rows = self.plan.order[window.column("start")[0].as_py() : window.column("stop")[0].as_py()]
        try:
            found = self._opened().table(self.sample_ids.take(pa.array(rows)).to_pylist())
        except InputError as error:
            found = fault_table(self.origin, len(rows), str(error))
        yield from (found.slice(row, 1) for row in range(found.num_rows))

    def _opened(self) -> CacheReader:
        if self.reader is None:
            self._wait()
            reader = CacheReader(self.address, self.origin.taps)
            reader.origin.check_fits(self.origin, f"the cache {self.address}")
            self.reader = reader
        return self.reader

    def _wait(self) -> None:
        folder, since = Folder(self.address), time.monotonic()
        while MANIFEST not in folder.sizes():
            if time.monotonic() - since > _WAIT_S:
                raise InputError(f"the cache {self.address} was not completed within {_WAIT_S:.0f} s of its last shard")
            time.sleep(_LOOK_S)
