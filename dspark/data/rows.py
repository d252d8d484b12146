"""Rendered samples as one Arrow table: token rows as they are kept in memory, in the object store and on disk."""

import hashlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dspark.data.render import Sample

SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("conversation_id", pa.string(), nullable=False),
        pa.field("domain", pa.string()),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.binary(), nullable=False),
    ]
)


def rows_table(samples: Sequence[Sample]) -> pa.Table:
    """The table of rendered samples, in their order."""
    return pa.table(
        [
            pa.array([sample.sample_id for sample in samples], pa.string()),
            pa.array([sample.conversation_id for sample in samples], pa.string()),
            pa.array([sample.domain for sample in samples], pa.string()),
            pa.array([sample.input_ids for sample in samples], pa.list_(pa.int32())),
            pa.array([sample.loss_mask.tobytes() for sample in samples], pa.binary()),
        ],
        schema=SCHEMA,
    )


def samples_fingerprint(sample_ids: Sequence[str]) -> str:
    """Hash of sample ids in their order: the identity of a data set."""
    return hashlib.sha256("\n".join(sample_ids).encode()).hexdigest()[:32]


def supervised_counts(rows: pa.Table, vocab: int) -> NDArray[np.int64]:
    """How often each token id [V] is supervised."""
    ids = rows.column("input_ids").combine_chunks().flatten().to_numpy()
    mask = np.frombuffer(b"".join(rows.column("loss_mask").to_pylist()), dtype=np.uint8)
    return np.bincount(ids[mask.astype(bool)], minlength=vocab)


def sample_at(table: pa.Table, row: int) -> Sample:
    """The sample in a row; its arrays share the table's memory and must not be written to."""
    return Sample(
        sample_id=table.column("sample_id")[row].as_py(),
        conversation_id=table.column("conversation_id")[row].as_py(),
        domain=table.column("domain")[row].as_py(),
        input_ids=table.column("input_ids")[row].values.to_numpy(),
        loss_mask=np.frombuffer(table.column("loss_mask")[row].as_buffer(), dtype=np.uint8),
    )
