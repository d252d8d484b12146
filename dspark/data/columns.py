"""Memory of a captured table that is being read: one block, where each value has its place before it is there."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dspark.data.origin import Origin, schema_of

# Arrow's own.
_ALIGNMENT = 64


class Column:
    """One column of a table being read: a block of memory, cut into the samples' parts."""

    def __init__(self, offsets: NDArray[np.int64], block: NDArray[np.uint8]) -> None:
        self.offsets, self._block = offsets, block
        self.buffer = pa.py_buffer(block)

    def part(self, row: int) -> NDArray[np.uint8]:
        """Memory of one sample's value, to be written to."""
        return self._block[self.offsets[row] : self.offsets[row + 1]]


def empty_columns(lengths: NDArray[np.int32], widths: Sequence[int]) -> list[Column]:
    """Empty columns of samples of these lengths, `width` bytes a token.

    All lie in one block: numpy asks for huge pages for large ones, and small pages, made anew for each table, cost more
    time than reading does.
    """
    offsets = [np.concatenate([[0], np.cumsum(lengths.astype(np.int64) * width)]) for width in widths]
    starts = np.cumsum([0, *(int(column[-1]) + -int(column[-1]) % _ALIGNMENT for column in offsets)])
    block = np.empty(int(starts[-1]), np.uint8)
    return [Column(column, block[start : start + column[-1]]) for column, start in zip(offsets, starts, strict=False)]


def as_table(origin: Origin, sample_ids: pa.Array, columns: Sequence[Column]) -> pa.Table:
    """The contract's table around columns that were filled: ids, mask, taps, final. Nothing is copied."""
    ids, mask, *states = columns
    values = pa.Array.from_buffers(pa.int32(), len(ids.buffer) // 4, [None, ids.buffer])
    arrays: list[pa.Array] = [
        sample_ids,
        pa.ListArray.from_arrays(pa.array(ids.offsets // 4, pa.int32()), values),
        _binary(pa.binary(), mask.offsets.astype(np.int32), mask.buffer),
        *(_binary(pa.large_binary(), state.offsets, state.buffer) for state in states),
    ]
    return pa.table(arrays, schema=schema_of(origin))


def _binary(kind: pa.DataType, offsets: NDArray[np.integer[Any]], data: pa.Buffer) -> pa.Array:
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, pa.py_buffer(offsets), data])
