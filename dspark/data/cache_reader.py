"""Reading a cache: any samples in any order, any subset of its taps, a bounded number of bytes ahead.

ids -> ledger: shard, places, checksums -> plain reads of those bytes -> stored form undone -> the contract's table

Nothing is mapped: what a reader holds is its ledger (some 500 bytes a sample) and the tables that it was asked for.
Columns are read where the ledger says they lie: a tap that is not wanted moves no bytes, and no footer is read.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from zlib_ng.zlib_ng import crc32

from dspark.data.cache import bytes_per_token
from dspark.data.codecs import Form, unpack
from dspark.data.columns import as_table, empty_columns
from dspark.data.folder import Folder, Source
from dspark.data.manifest import read_ledger, read_manifest
from dspark.data.origin import Origin
from dspark.data.prefetch import ahead
from dspark.data.shard_record import Distortion, value_columns
from dspark.data.shards import StoredSample
from dspark.errors import InputError

_OPEN_SHARDS = 32
# Values this near are read at once: headers of pages lie between, and a request costs more than these bytes.
_GAP_BYTES = 4096
# How much of what comes next the disk is told of.
_ANNOUNCED_BYTES = 32 * 2**20
# A smaller value is checked sooner than handed to another thread.
_CHECKED_BESIDE = 2**16


class _Span(NamedTuple):
    """Bytes start..end of a shard that are read at once, and the values in them, as numbers of wanted columns."""

    start: int
    end: int
    columns: tuple[int, ...]


class CacheReader:
    """A complete cache. Threads may share a reader, and take turns; any number of readers share a folder.

    `taps` are the wanted ones, in the order of the returned columns (None: all that are there). With `check`, each
    value's CRC-32 is compared when this reader reads it first; in later epochs it mostly comes from memory.

    Raises:
        InputError: no complete cache, a damaged manifest or ledger, or a tap that it does not hold.
    """

    def __init__(self, address: str, taps: Sequence[int] | None = None, check: bool = True) -> None:
        self._folder = Folder(address)
        self.address = self._folder.address
        self.manifest = read_manifest(self._folder)
        held = self.manifest.origin
        wanted = held.taps if taps is None else tuple(taps)
        if missing := sorted(set(wanted) - set(held.taps)):
            raise InputError(f"the cache {self.address} lacks taps {missing}: it holds {list(held.taps)}")
        self.origin = Origin(**{**vars(held), "taps": wanted})
        ledger = read_ledger(self._folder, self.manifest)
        self._ids = ledger.column("sample_id").combine_chunks()
        self.lengths: NDArray[np.int32] = ledger.column("length").to_numpy()
        self._shard: NDArray[np.int32] = ledger.column("shard").to_numpy()
        self._names = value_columns(held.taps)
        self._wanted = [self._names.index(name) for name in value_columns(wanted)]
        self._widths = [4, 1, *[2 * held.hidden] * (len(wanted) + 1)]
        self._offsets, self._sizes, self._crc32 = (
            _matrix(ledger, name, len(self._names)) for name in ("offsets", "sizes", "crc32")
        )
        # Ids and mask are stored as they are.
        states = [self._names[held] for held in self._wanted[2:]]
        self._forms: list[Form] = ["bf16", "bf16", *map(self.manifest.codec.form, states)]
        # A remote read costs a request whatever its size.
        self._gap = 0 if self._folder.local is not None else _GAP_BYTES
        self._spare = np.empty(0, np.uint8)
        self._lock = threading.Lock()
        self._unchecked = np.ones(self._crc32.shape, np.bool_) if check else None
        # Checksums run beside the reads: `crc32` lets go of the interpreter, as system calls do.
        self._checker = ThreadPoolExecutor(1, "checksums") if check else None
        self._open: OrderedDict[int, Source] = OrderedDict()

    @cached_property
    def sample_ids(self) -> tuple[str, ...]:
        """All samples, in the cache's order."""
        return tuple(self._ids.to_pylist())

    @cached_property
    def _places(self) -> dict[str, int]:
        return {sample: place for place, sample in enumerate(self.sample_ids)}

    def table(self, ids: Sequence[str]) -> pa.Table:
        """The captured table of these samples, in this order, whatever the codec.

        Raises:
            InputError: a sample that is not there, a shard that is missing, truncated or damaged (names shard and row).
        """
        self._announce([self._place(sample) for sample in ids])
        return self._table(ids)

    def _table(self, ids: Sequence[str]) -> pa.Table:
        places = [self._place(sample) for sample in ids]
        columns = empty_columns(self.lengths[places], self._widths)
        # In the order of the files, whatever was asked for.
        checks = [
            self._read(places[row], self._forms, [column.part(row) for column in columns])
            for row in sorted(range(len(places)), key=lambda row: places[row])
        ]
        _await(checks)
        return as_table(self.origin, self._ids.take(pa.array(places, pa.int64())), columns)

    def stored(self, sample: str) -> StoredSample:
        """One sample with the wanted values as they lie on disk.

        Its distortion is the cache's as a whole: that of single samples is not kept.
        """
        place = self._place(sample)
        parts = [np.empty(self._sizes[place, held], np.uint8) for held in self._wanted]
        _await([self._read(place, ["bf16"] * len(parts), parts)])
        ids, mask, *states = parts
        names = [self._names[held] for held in self._wanted[2:]]
        tokens = int(self.lengths[place])
        errors = {
            name: Distortion(found["max"], found["rms"] ** 2 * tokens, tokens)
            for name, found in self.manifest.errors.items()
            if name in names
        }
        values = {name: pa.py_buffer(state) for name, state in zip(names, states, strict=True)}
        return StoredSample(sample, ids.view("<i4"), pa.py_buffer(mask), values, errors)

    def stored_bytes(self, samples: Sequence[str]) -> NDArray[np.int64]:
        """Bytes of the wanted values of each sample on disk."""
        places = [self._place(sample) for sample in samples]
        sums: NDArray[np.int64] = self._sizes[places][:, self._wanted].sum(axis=1)
        return sums

    def tables(self, batches: Iterable[Sequence[str]], ahead_bytes: int) -> Iterator[pa.Table]:
        """The tables of `batches`, in order, read on a background thread.

        At most `ahead_bytes` are read or waiting beyond the table that was handed out last; one larger table passes
        alone.
        """
        token_bytes = bytes_per_token(self.origin)

        def size(ids: Sequence[str]) -> int:
            return token_bytes * sum(self.tokens(sample) for sample in ids)

        return ahead(self._announced(batches, size), self._table, size, ahead_bytes)

    def tokens(self, sample: str) -> int:
        """Tokens of a sample."""
        return int(self.lengths[self._place(sample)])

    def close(self) -> None:
        """Closes its files; the reader can still be used."""
        while self._open:
            self._open.popitem()[1].close()

    def __del__(self) -> None:
        # A reader whose making failed has none.
        if (checker := getattr(self, "_checker", None)) is not None:
            checker.shutdown(wait=False)

    def _place(self, sample: str) -> int:
        if sample not in self._places:
            raise InputError(f"the cache {self.address} does not hold the sample {sample}")
        return self._places[sample]

    def _read(self, place: int, forms: Sequence[Form], parts: Sequence[NDArray[np.uint8]]) -> list[Future[None]]:
        """One sample's wanted values into `parts`, each freed from its form; returns checks that are still running."""
        with self._lock:
            return self._read_locked(place, forms, parts)

    def _read_locked(self, place: int, forms: Sequence[Form], parts: Sequence[NDArray[np.uint8]]) -> list[Future[None]]:
        source = self._source(int(self._shard[place]))
        checks: list[Future[None]] = []
        for span in self._spans(place):
            # A local read goes straight to its place in the table.
            direct = len(span.columns) == 1 and forms[span.columns[0]] == "bf16"
            data = parts[span.columns[0]] if direct else self._scratch(span.end - span.start)
            try:
                got = source.read_into(span.start, data)
            except OSError as error:
                raise self._damaged(place, f"it cannot be read ({error.strerror or error})") from error
            if got != len(data):
                raise self._damaged(place, f"the file ends after {span.start + got:,} bytes")
            for column in span.columns:
                held = self._wanted[column]
                start = self._offsets[place, held] - span.start
                stored = data[start : start + self._sizes[place, held]]
                if not direct:
                    self._compare(place, held, stored)
                    self._undo(place, held, forms[column], stored, parts[column])
                elif self._checker is None or self._unchecked is None or len(stored) < _CHECKED_BESIDE:
                    self._compare(place, held, stored)
                elif self._unchecked[place, held]:
                    checks.append(self._checker.submit(self._compare, place, held, stored))
        return checks

    def _compare(self, place: int, held: int, stored: NDArray[np.uint8]) -> None:
        if self._unchecked is not None and self._unchecked[place, held]:
            if crc32(stored.data) != self._crc32[place, held]:
                raise self._damaged(place, f"its {self._names[held]} has another checksum than the ledger's")
            self._unchecked[place, held] = False

    def _undo(self, place: int, held: int, form: Form, stored: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        try:
            unpack(form, stored, out, self.origin.hidden)
        except (OSError, ValueError) as error:
            raise self._damaged(place, f"its {self._names[held]} is not of the form {form} ({error})") from error

    def _spans(self, place: int) -> list[_Span]:
        """What to read of one sample, in the order of the file."""
        offsets, sizes = self._offsets[place], self._sizes[place]
        spans: list[_Span] = []
        for column in sorted(range(len(self._wanted)), key=lambda column: self._wanted[column]):
            start = int(offsets[self._wanted[column]])
            end = start + int(sizes[self._wanted[column]])
            if spans and start - spans[-1].end <= self._gap:
                spans[-1] = _Span(spans[-1].start, end, (*spans[-1].columns, column))
            else:
                spans.append(_Span(start, end, (column,)))
        return spans

    def _scratch(self, size: int) -> NDArray[np.uint8]:
        """Memory for stored bytes, used again and again: fresh pages cost more than the copy out of them."""
        if len(self._spare) < size:
            self._spare = np.empty(size, np.uint8)
        return self._spare[:size]

    def _announced(
        self, batches: Iterable[Sequence[str]], size: Callable[[Sequence[str]], int]
    ) -> Iterator[Sequence[str]]:
        """The batches; while one is being read, the disk is at the next ones."""
        waiting: deque[tuple[Sequence[str], int]] = deque()
        told = 0
        for batch in batches:
            taken = 0
            with suppress(InputError):  # raised when it is this batch's turn
                self._announce([self._place(sample) for sample in batch])
                taken = size(batch)
            waiting.append((batch, taken))
            told += taken
            while told > _ANNOUNCED_BYTES and len(waiting) > 1:
                batch, taken = waiting.popleft()
                told -= taken
                yield batch
        yield from (batch for batch, _ in waiting)

    def _announce(self, places: Sequence[int]) -> None:
        """Lets the disk begin with all that will be read of some samples, so that it has more than one request."""
        with self._lock:
            for place in sorted(places):
                source = self._source(int(self._shard[place]))
                for span in self._spans(place):
                    source.will_read(span.start, span.end - span.start)

    def _source(self, index: int) -> Source:
        if index not in self._open:
            shard = self.manifest.shards[index]
            source = self._folder.source(shard.file)
            if source.size != shard.bytes:
                source.close()
                raise InputError(
                    f"{self._folder.where(shard.file)} has {source.size:,} bytes, the manifest says {shard.bytes:,}: "
                    "it is truncated or another cache's; `dspark cache verify` checks the others"
                )
            self._open[index] = source
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(index)
        return self._open[index]

    def _damaged(self, place: int, what: str) -> InputError:
        shard = int(self._shard[place])
        row = place - int(np.searchsorted(self._shard, shard))
        file = self._folder.where(self.manifest.shards[shard].file)
        return InputError(
            f"{file}, row {row} (sample {self._ids[place].as_py()}): {what}: the file is damaged; "
            "`dspark cache verify` checks the others"
        )


def _await(checks: Sequence[Sequence[Future[None]]]) -> None:  # raises what the first bad one found
    for check in chain.from_iterable(checks):
        check.result()


def _matrix(ledger: pa.Table, name: str, width: int) -> NDArray[np.int64]:
    """A list column of the ledger as [samples, width]."""
    return ledger.column(name).combine_chunks().flatten().to_numpy().reshape(-1, width)
