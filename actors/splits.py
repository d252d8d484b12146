"""A rank's end of a stream. Apart from `actors.pipelines`, for the trainers."""

from collections.abc import Iterator

import pyarrow as pa
from ray.data import DataIterator


def blocks_of(stream: DataIterator) -> Iterator[pa.Table]:
    """The blocks of a split as they come, one asked for ahead."""
    # Without a batch size blocks are passed on uncut; the annotation knows numbers alone.
    return iter(stream.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1))  # type: ignore[arg-type]
