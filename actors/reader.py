"""A cache in a Ray process: sample ids of windows in, captured tables out, as if a target had captured them."""

import time

import pyarrow as pa

from dspark.data.cache_reader import CacheReader
from dspark.data.captures import Origin, fault_table
from dspark.data.folder import Folder
from dspark.data.manifest import MANIFEST
from dspark.errors import InputError

# All shards are there when a reader is first asked; to complete the cache is to join their parts of the ledger.
_WAIT_S, _LOOK_S = 1800.0, 0.5


class CacheActor:
    """One reader of one cache, which may be about to be completed by the driver."""

    def __init__(self, address: str, origin: Origin) -> None:
        self.address, self.origin = address, origin
        self.reader: CacheReader | None = None

    def __call__(self, window: pa.Table) -> pa.Table:
        try:
            return self._opened().table(window.column("sample_id").to_pylist())
        except InputError as error:
            return fault_table(self.origin, window.num_rows, str(error))

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
