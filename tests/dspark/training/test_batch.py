"""From a captured table to padded tensors."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
import torch

from dspark.data.captures import encode
from dspark.data.origin import Origin
from dspark.data.render import Sample
from dspark.training.batch import collate, finite_samples, loss_masks

HIDDEN = 4


def sample(name: str, ids: Sequence[int], mask: Sequence[int]) -> Sample:
    return Sample(name, name, None, np.array(ids, dtype=np.int32), np.array(mask, dtype=np.uint8))


def states(length: int, value: int) -> torch.Tensor:
    """Small integers, which bf16 holds exactly."""
    return (torch.arange(length * HIDDEN).view(length, HIDDEN) + value).float()


def table() -> pa.Table:
    origin = Origin("t", "local", "f", "r", (-1, 3), HIDDEN, "fp32")
    samples = [sample("a", [5, 6, 7], [0, 1, 1]), sample("b", [8], [1])]
    taps = {-1: [states(3, 0), states(1, 20)], 3: [states(3, 40), states(1, 60)]}
    return encode(origin, samples, taps, [states(3, 80), states(1, 100)])


def test_rows_are_padded_at_the_end_with_zeros_outside_the_loss() -> None:
    batch = collate(table(), (-1, 3), HIDDEN, torch.float32)
    assert batch.input_ids_BS.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch.loss_mask_BS.tolist() == [[False, True, True], [True, False, False]]
    assert batch.positions_BS.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert torch.equal(batch.final_BSH[0], states(3, 80))
    assert torch.equal(batch.final_BSH[1], torch.cat((states(1, 100), torch.zeros(2, HIDDEN))))


def test_taps_are_joined_in_the_order_that_the_drafter_asks_for() -> None:
    batch = collate(table(), (3, -1), HIDDEN, torch.float32)
    assert torch.equal(batch.taps_BSLH[0], torch.cat((states(3, 40), states(3, 0)), dim=1))
    assert torch.equal(batch.taps_BSLH[1, 0], torch.cat((states(1, 60)[0], states(1, 20)[0])))
    only = collate(table(), (3,), HIDDEN, torch.float32)
    assert torch.equal(only.taps_BSLH, batch.taps_BSLH[..., :HIDDEN])


def test_states_have_the_wanted_type_and_ids_are_int64() -> None:
    batch = collate(table(), (-1, 3), HIDDEN, torch.bfloat16)
    assert (batch.taps_BSLH.dtype, batch.final_BSH.dtype) == (torch.bfloat16, torch.bfloat16)
    assert batch.input_ids_BS.dtype == torch.int64


def test_writing_to_a_batch_leaves_its_table_as_it_was() -> None:
    captured = table()
    batch = collate(captured, (-1, 3), HIDDEN, torch.bfloat16)
    for tensor in (batch.input_ids_BS, batch.loss_mask_BS, batch.taps_BSLH, batch.final_BSH):
        tensor.zero_()
    assert captured.equals(table())


def test_loss_masks_are_read_row_by_row() -> None:
    assert [mask.tolist() for mask in loss_masks(table())] == [[0, 1, 1], [1]]


def test_a_slice_of_a_table_gives_the_batch_of_its_rows() -> None:
    batch = collate(table().slice(1), (-1, 3), HIDDEN, torch.float32)
    assert batch.input_ids_BS.tolist() == [[8]]
    assert torch.equal(batch.final_BSH[0], states(1, 100))


def test_padding_and_blank_samples_are_zeros_whatever_the_memory_held() -> None:
    for _ in range(8):  # freed memory of the same size is likely to be used again
        torch.full((2, 3, 2 * HIDDEN), float("nan"))
        batch = collate(table(), (-1, 3), HIDDEN, torch.float32, blank={0})
        assert not batch.taps_BSLH[0].any() and not batch.final_BSH[0].any()
        assert torch.equal(batch.taps_BSLH[1, 0], torch.cat((states(1, 20)[0], states(1, 60)[0])))
        assert not batch.taps_BSLH[1, 1:].any() and not batch.final_BSH[1, 1:].any()


@pytest.mark.parametrize("column", [-1, 3, None])
@pytest.mark.parametrize(
    ("bits", "finite"),
    [
        *((bits, True) for bits in (0x7F7F, 0xFF7F, 0x8000, 0x0001)),
        *((bits, False) for bits in (0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0xFFFF)),
    ],
)
def test_a_sample_is_finite_iff_none_of_the_wanted_states_has_all_exponent_bits(
    bits: int, finite: bool, column: int | None
) -> None:
    """The largest of both signs, minus zero and the smallest are finite; infinities and any NaN are not."""
    bad = states(3, 0).to(torch.bfloat16)
    bad.view(torch.int16)[1, 2] = bits - 0x10000 if bits > 0x7FFF else bits
    origin = Origin("t", "local", "f", "r", (-1, 3), HIDDEN, "fp32")
    clean = states(3, 0)
    taps = {tap: [bad if column == tap else clean] for tap in (-1, 3)}
    captured = encode(origin, [sample("a", [5, 6, 7], [0, 1, 1])], taps, [bad if column is None else clean])
    assert finite_samples(captured, (-1, 3)) == [finite]
    assert finite_samples(captured, (3,)) == [finite or column == -1]
