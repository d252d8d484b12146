"""From a captured table to padded tensors on a device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.data.captures import bf16_column, final_column, tap_column


@dataclass(frozen=True)
class Batch:
    """Rows of a micro-batch, padded at the end. B rows, S positions, L taps, H hidden width."""

    input_ids_BS: Tensor  # int64
    loss_mask_BS: Tensor  # bool; false on padding
    taps_BSLH: Tensor  # [B, S, L*H], taps concatenated in the drafter's order
    final_BSH: Tensor  # state after the target's last norm

    @property
    def positions_BS(self) -> Tensor:
        """Positions 0..S-1 of every row."""
        rows, length = self.input_ids_BS.shape
        return torch.arange(length, device=self.input_ids_BS.device).expand(rows, length)


def loss_masks(table: pa.Table) -> list[NDArray[np.uint8]]:
    """The loss mask of each row, one byte per token."""
    return [np.frombuffer(mask.as_py(), dtype=np.uint8) for mask in table.column("loss_mask")]


def collate(table: pa.Table, taps: Sequence[int], hidden: int, device: torch.device, dtype: torch.dtype) -> Batch:
    """Pads and concatenates the rows of a captured table (`dspark.data.captures`)."""
    masks = loss_masks(table)
    length = max(len(mask) for mask in masks)
    ids_BS = torch.zeros(table.num_rows, length, dtype=torch.int64)
    mask_BS = torch.zeros(table.num_rows, length, dtype=torch.bool)
    states = {name: torch.zeros(table.num_rows, length, hidden, dtype=dtype) for name in _columns(taps)}
    for row, mask in enumerate(masks):
        size = len(mask)
        ids_BS[row, :size] = torch.from_numpy(table.column("input_ids")[row].values.to_numpy().astype(np.int64))
        mask_BS[row, :size] = torch.from_numpy(mask.astype(bool))
        for name, padded in states.items():
            padded[row, :size] = bf16_column(table, name, row, hidden)
    joined = torch.cat([states[tap_column(tap)] for tap in taps], dim=-1)
    return Batch(ids_BS.to(device), mask_BS.to(device), joined.to(device), states[final_column()].to(device))


def _columns(taps: Sequence[int]) -> list[str]:
    return [*(tap_column(tap) for tap in taps), final_column()]
