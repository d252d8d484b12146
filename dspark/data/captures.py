"""Captured states as tensors: how they enter the contract's table (`dspark.data.origin`), and how they are read."""

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dspark.data.origin import Origin, schema_of
from dspark.data.render import Sample

# Tensors over Arrow memory are read only here by agreement (`bf16_column`); torch would warn of it in every process.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


def encode(
    origin: Origin, samples: Sequence[Sample], taps: Mapping[int, Sequence[Tensor]], final: Sequence[Tensor]
) -> pa.Table:
    """The table of `samples` with their states: for each tap and for `final`, one tensor [S, H] per sample."""
    columns: list[pa.Array] = [
        pa.array([sample.sample_id for sample in samples], pa.string()),
        pa.array([sample.input_ids for sample in samples], pa.list_(pa.int32())),
        pa.array([sample.loss_mask.tobytes() for sample in samples], pa.binary()),
        *(_binary(taps[tap]) for tap in origin.taps),
        _binary(final),
    ]
    return pa.table(columns, schema=schema_of(origin))


def _binary(states: Sequence[Tensor]) -> pa.Array:
    """One large_binary value per tensor, copied once into one buffer."""
    flat = torch.cat([state.to(torch.bfloat16).reshape(-1) for state in states]).contiguous().view(torch.uint8)
    sizes = [state.numel() * 2 for state in states]
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(states), [None, pa.py_buffer(offsets), pa.py_buffer(flat.cpu().numpy())]
    )


def is_finite(table: pa.Table, name: str, row: int) -> bool:
    """Whether no state of one row of a bf16 column is infinite or not a number.

    Such values have all exponent bits set: 0x7F80 and above without the sign, 0xFF80 and above with it. Both are the
    largest of their kind of integer, so two maxima find them without a copy, 20 times as fast as `Tensor.isfinite`.
    """
    buffer = table.column(name)[row].as_buffer()
    signed, unsigned = np.frombuffer(buffer, "<i2"), np.frombuffer(buffer, "<u2")
    return bool(signed.max() < 0x7F80 and unsigned.max() < 0xFF80)


def bf16_column(table: pa.Table, name: str, row: int, hidden: int) -> Tensor:
    """One row's states [S, H], bf16. The memory is the table's own and must never be written to."""
    buffer = table.column(name)[row].as_buffer()
    return torch.frombuffer(memoryview(buffer), dtype=torch.bfloat16).view(-1, hidden)
