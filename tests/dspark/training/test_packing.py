"""Packed rows: nothing crosses a document's boundary, and a step's sums and gradients are those of rows alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from dspark.model.config import DSparkConfig
from dspark.training.batch import Place, collate, finite_samples, pack
from dspark.training.blocks import make_blocks, visibility
from dspark.training.means import add_means, stack_means
from dspark.training.objective import DraftObjective, step_weight
from dspark.training.share import Share, placed
from tests.dspark.small import HEADS, positions, small_batch, small_config, small_drafter, small_vocabulary
from tests.dspark.training.shares import captured, settings_of, share_of

# Every supervised stretch ends at its document's end, so that a block's labels would run on into the next document.
MASKS = [
    [0, 1, 1, 1, 1],
    [1, 1, 1],
    [0, 0, 0, 0],
    [0, 1, 1, 0, 1, 1, 1, 1, 1],
    [1],
    [1, 1, 1, 1, 1, 1, 1],
]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=10), st.integers(1, 20))
def test_every_sample_has_a_place_of_its_own_and_rows_stay_below_the_limit(lengths: list[int], tokens: int) -> None:
    places = pack(lengths, tokens)
    taken = [(place.row, place.column + i) for place, size in zip(places, lengths, strict=True) for i in range(size)]
    assert len(taken) == len(set(taken)) == sum(lengths)
    rows = [[size for place, size in zip(places, lengths, strict=True) if place.row == row] for row in range(99)]
    used = [sum(row) for row in rows if row]
    assert all(sum(row) <= tokens or len(row) == 1 for row in rows)
    # Filled without gaps, and no two rows could share one.
    assert [sum(row) for row in rows[: len(used)]] == used
    assert {place.column for place in places} == {
        sum(row[:n]) for row in (sorted(row, reverse=True) for row in rows[: len(used)]) for n in range(len(row))
    }
    assert all(one + other > tokens for i, one in enumerate(used) for other in used[:i])


def test_places_of_five_samples_by_hand() -> None:
    assert pack([2, 5, 3, 5, 9], tokens=8) == [Place(2, 5), Place(1, 0), Place(1, 5), Place(2, 0), Place(0, 0)]
    assert pack([2, 5], tokens=None) == [Place(0, 0), Place(1, 0)]


def test_documents_of_a_row_stand_side_by_side_with_positions_of_their_own() -> None:
    config = small_config()
    table = captured(config, [[1, 1, 0], [1, 1]])
    alone = collate(table, config.taps, config.hidden, torch.float32)
    batch = collate(table, config.taps, config.hidden, torch.float32, [Place(0, 0), Place(0, 3)])
    assert batch.starts_BS.tolist() == [[0, 0, 0, 3, 3]]
    assert batch.positions_BS.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.loss_mask_BS.tolist() == [[True, True, False, True, True]]
    for name in ("input_ids_BS", "taps_BSLH", "final_BSH"):
        packed, rows = getattr(batch, name), getattr(alone, name)
        assert torch.equal(packed[0], torch.cat((rows[0], rows[1, :2])))


def test_neither_labels_nor_tokens_nor_context_of_a_block_cross_a_boundary() -> None:
    ids = torch.arange(100, 108)[None]
    starts = torch.tensor([[0, 0, 0, 0, 4, 4, 4, 4]])
    blocks = make_blocks(ids, torch.ones(1, 8), positions([2, 4, 6]), 3, None, starts)
    assert blocks.positions_BAK.tolist() == [[[2, 3, 4], [0, 1, 2], [2, 3, 4]]]
    assert blocks.previous_BAK.tolist() == [[[102, 103, 0], [104, 105, 106], [106, 107, 0]]]
    assert blocks.labels_BAK.tolist() == [[[103, 0, 0], [105, 106, 107], [107, 0, 0]]]
    assert blocks.weights_BAK.tolist() == [[[1, 0, 0], [1, 1, 1], [1, 0, 0]]]
    seen = visibility(blocks, 8)[0, 0, :, :8].int().tolist()
    assert seen[::3] == [[1, 1, 0, 0, 0, 0, 0, 0], [0] * 8, [0, 0, 0, 0, 1, 1, 0, 0]]
    assert seen[1::3] == seen[::3] == seen[2::3]


def losses(config: DSparkConfig, share: Share) -> tuple[list[float], Tensor, dict[str, Tensor]]:
    """Loss of each micro-batch over the step's weight, all metrics, and the step's gradients."""
    module = DraftObjective(small_drafter(config), settings_of(config).loss)
    objectives = [
        module(small_vocabulary(config), batch, blocks, share.weights.sum())
        for batch, blocks in zip(share.batches, share.blocks, strict=True)
    ]
    torch.stack([objective.loss for objective in objectives]).sum().backward()
    gradients = {name: parameter.grad for name, parameter in module.drafter.named_parameters()}
    means = stack_means(add_means([share.counts, *(objective.means for objective in objectives)]))
    return (
        [objective.loss.item() for objective in objectives],
        means,
        {k: v for k, v in gradients.items() if v is not None},
    )


def assert_equal_steps(config: DSparkConfig, packed: Share, alone: Share) -> None:
    torch.testing.assert_close(packed.weights, alone.weights, rtol=1e-7, atol=0)
    assert packed.tokens == alone.tokens
    found, expected = losses(config, packed), losses(config, alone)
    assert found[0] == pytest.approx(expected[0], rel=1e-6, abs=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-6)
    assert found[2].keys() == expected[2].keys()
    for name, gradient in found[2].items():
        scale = expected[2][name].abs().max().item()
        torch.testing.assert_close(gradient, expected[2][name], rtol=0, atol=1e-6 * max(1.0, scale))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("micro_batch", [2, 6])
def test_a_packed_step_equals_the_step_of_rows_alone(head: str, micro_batch: int) -> None:
    config = small_config(head)
    train: dict[str, Any] = {"global_batch": 6, "micro_batch": micro_batch}
    table = captured(config, MASKS)
    alone = share_of(table, config, settings_of(config, **train))
    packed = share_of(table, config, settings_of(config, pack_tokens=16, **train))
    rows = [len(batch.input_ids_BS) for batch in packed.batches]
    assert rows == ([1, 1, 1] if micro_batch == 2 else [2])
    assert sum(int(blocks.keep_BA.sum()) for blocks in packed.blocks) > 10
    assert_equal_steps(config, packed, alone)


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=2, max_size=6),
    st.integers(16, 40),
    st.integers(1, 5),
    st.data(),
)
def test_any_rows_have_the_same_blocks_packed_and_alone(
    masks: list[list[int]], tokens: int, anchors: int, data: st.DataObject
) -> None:
    config = small_config()
    table = captured(config, masks)
    counted = data.draw(st.lists(st.booleans(), min_size=len(masks), max_size=len(masks)))
    train: dict[str, Any] = {"global_batch": len(masks), "micro_batch": len(masks), "anchors": anchors}
    shares = [
        share_of(table, config, settings_of(config, **train), counted),
        share_of(table, config, settings_of(config, pack_tokens=tokens, **train), counted),
    ]
    alone, packed = (sorted(_kept(share)) for share in shares)
    assert packed == alone
    for name, mean in shares[0].counts.items():
        assert mean == shares[1].counts[name]


def _kept(share: Share) -> list[tuple[Any, ...]]:
    """Everything that a block is, beside its place; slots without weight mean nothing."""
    (blocks,), (batch,) = share.blocks, share.batches
    found = []
    for row, block in blocks.keep_BA.nonzero().tolist():
        valid = blocks.valid_BAK[row, block]
        anchor = int(blocks.anchors_BA[row, block])
        context = batch.input_ids_BS[row, int(blocks.starts_BA[row, block]) : anchor]
        own = [blocks.positions_BAK, blocks.previous_BAK, blocks.labels_BAK, blocks.weights_BAK]
        found.append((context.tolist(), *(tensor[row, block][valid].tolist() for tensor in own)))
    return found


@pytest.mark.parametrize("head", HEADS)
def test_nan_behind_the_last_anchor_of_a_document_reaches_no_other_document(head: str) -> None:
    """Three documents in a row: NaN behind the anchors of the first, all over the second, which has none."""
    config = small_config(head)
    documents, anchors = [6, 4, 6], [[0, 2], [], [1, 3]]
    batch = small_batch(config, [[1] * sum(documents)])
    starts = torch.tensor([[0] * 6 + [6] * 4 + [10] * 6])
    clean = replace(batch, packed_starts_BS=starts)
    broken = replace(clean, taps_BSLH=clean.taps_BSLH.clone(), final_BSH=clean.final_BSH.clone())
    broken.taps_BSLH[0, 2:10] = float("nan")
    broken.taps_BSLH[0, 13:] = float("nan")
    broken.final_BSH[0, 6:10] = float("nan")
    places = [Place(0, 0), Place(0, 6), Place(0, 10)]
    columns = placed(positions(*anchors), places)
    found = []
    for one in (clean, broken):
        blocks = make_blocks(one.input_ids_BS, one.loss_mask_BS, columns, config.block, 4.0, starts)
        module = DraftObjective(small_drafter(config), settings_of(config).loss)
        objective = module(small_vocabulary(config), one, blocks, step_weight(blocks))
        objective.loss.backward()
        found.append((objective.means, {name: value.grad for name, value in module.drafter.named_parameters()}))
    (expected, expected_gradients), (means, gradients) = found
    assert torch.equal(stack_means(means), stack_means(expected))
    for name, gradient in gradients.items():
        expected_gradient = expected_gradients[name]
        assert gradient is not None and expected_gradient is not None
        assert torch.equal(gradient, expected_gradient), name


@pytest.mark.parametrize("pack_tokens", [None, 40])
def test_a_sample_with_non_finite_states_is_left_out_and_its_neighbours_train_on(pack_tokens: int | None) -> None:
    config = small_config()
    train: dict[str, Any] = {"global_batch": 6, "micro_batch": 6, "pack_tokens": pack_tokens}
    broken = share_of(captured(config, MASKS, broken=[3]), config, settings_of(config, **train))
    without = share_of(captured(config, MASKS), config, settings_of(config, **train), [i != 3 for i in range(6)])
    assert broken.counts["rows_not_finite"].total.item() == 1
    assert losses(config, broken)[0] == pytest.approx(losses(config, without)[0], rel=1e-6)
    assert len(broken.batches[0].input_ids_BS) == (6 if pack_tokens is None else 1)


def test_only_the_documents_that_hold_a_non_finite_state_are_blanked() -> None:
    """A blank document before a full one and behind one, and padding behind both."""
    config = small_config()
    places = [Place(0, 0), Place(1, 2), Place(0, 3), Place(1, 0)]
    train: dict[str, Any] = {"global_batch": 4, "micro_batch": 4, "pack_tokens": 16}
    table = captured(config, [[1] * 3, [1] * 2, [1] * 2, [1] * 2], broken=[0, 1])
    assert finite_samples(table, config.taps) == [False, False, True, True]
    full = collate(captured(config, [[1] * 3, [1] * 2, [1] * 2, [1] * 2]), config.taps, config.hidden, torch.float32)
    batch = collate(table, config.taps, config.hidden, torch.float32, places, blank={0, 1})
    for name in ("taps_BSLH", "final_BSH"):
        states, rows = getattr(batch, name), getattr(full, name)
        assert not states[0, :3].any() and torch.equal(states[0, 3:], rows[2, :2])
        assert torch.equal(states[1, :2], rows[3, :2]) and not states[1, 2:].any()
    (packed,) = share_of(table, config, settings_of(config, **train)).batches
    assert packed.taps_BSLH.isfinite().all() and packed.taps_BSLH.any()


def test_rows_that_fill_the_last_step_have_no_weight_when_packed() -> None:
    config = small_config()
    settings = settings_of(config, global_batch=4, micro_batch=4, pack_tokens=40)
    table = captured(config, [MASKS[0], MASKS[1], MASKS[5], MASKS[5]])
    share = share_of(table, config, settings, [True, True, True, False])
    fewer = share_of(table.slice(0, 3), config, settings_of(config, global_batch=3, micro_batch=3, pack_tokens=40))
    assert share.weights.sum().item() == pytest.approx(fewer.weights.sum().item())
    assert sorted(_kept(share)) == sorted(_kept(fewer))
    nothing = share_of(table, config, settings, [False] * 4)
    assert nothing.weights.tolist() == [0] and losses(config, nothing)[0] == [0]


def test_anchors_of_samples_become_ascending_columns_of_their_rows() -> None:
    places = [Place(0, 4), Place(1, 0), Place(0, 0), Place(2, 0)]
    columns = placed(positions([0, 2], [1], [1, 3], []), places)
    assert [row.tolist() for row in columns] == [[1, 3, 4, 6], [1], []]
    assert all(row.dtype == np.int64 for row in columns)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"micro_batch": 1, "pack_tokens": 64}, "micro_batch=1 has nothing to pack"),
        ({"micro_batch": 2, "pack_tokens": 8}, "train.pack_tokens=8 is below data.max_length=16"),
    ],
)
def test_packing_that_could_not_work_is_refused(train: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings_of(small_config(), global_batch=4, **train)
