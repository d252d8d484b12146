"""What a block may look at, cell by cell: one input is changed, and exactly the outputs that may see it change.

The rows pack documents, have dummy blocks, anchors side by side and an anchor at position 0. What may be seen is
written down a second time here as a dense table, from the rules alone.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from dspark.model.config import DSparkConfig
from dspark.training.batch import Batch
from dspark.training.blocks import Blocks, block_inputs, make_blocks, visibility
from dspark.training.means import stack_means
from dspark.training.objective import DraftObjective, draft_logits, run_drafter, step_weight, target_logits
from tests.dspark.small import HEADS, positions, small_batch, small_config, small_drafter, small_vocabulary
from tests.dspark.training.shares import settings_of

STARTS = [[0, 0, 0, 0, 0, 5, 5, 5, 5, 5, 5], [0] * 11]
ANCHORS = [[1, 2, 5, 7], [0, 4]]
LENGTH, BLOCK = 11, 3
Slot = tuple[int, int, int]  # row, block, slot


def example(config: DSparkConfig) -> tuple[Batch, Blocks]:
    """Two rows of eleven columns: documents of 5 and 6 tokens, and a single document; all of it supervised."""
    starts = torch.tensor(STARTS)
    batch = replace(small_batch(config, [[1] * 11, [1] * 11]), packed_starts_BS=starts)
    return batch, blocks_of(config, batch)


def blocks_of(config: DSparkConfig, batch: Batch) -> Blocks:
    return make_blocks(
        batch.input_ids_BS, batch.loss_mask_BS, positions(*ANCHORS), config.block, None, batch.packed_starts_BS
    )


def outputs(config: DSparkConfig, batch: Batch, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Draft logits [B, A, K, V] and confidences [B, A, K] of all slots, zeros where there is no confidence head."""
    with torch.no_grad():
        vocabulary, drafter = small_vocabulary(config), small_drafter(config)
        output = run_drafter(drafter, vocabulary, batch, blocks)
        everything = torch.ones_like(blocks.valid_BAK)
        logits = draft_logits(drafter, vocabulary, output, everything).unflatten(0, everything.shape)
    return logits, torch.zeros(everything.shape) if output.confidence_BAK is None else output.confidence_BAK


def changed(before: Tensor, after: Tensor) -> set[Slot]:
    """The slots whose output differs in any bit; both [B, A, K, ...]."""
    return {(b, a, k) for b, a, k in (before != after).flatten(3).any(-1).nonzero().tolist()}


def slots_where(rule: Callable[[int, int, int], bool]) -> set[Slot]:
    """The slots of real blocks for which `rule(row, anchor, slot)` holds."""
    return {
        (row, block, slot)
        for row, own in enumerate(ANCHORS)
        for block, anchor in enumerate(own)
        for slot in range(BLOCK)
        if rule(row, anchor, slot)
    }


def same_document(row: int, one: int, other: int) -> bool:
    """Whether two columns of a row exist and hold tokens of one document."""
    return max(one, other) < LENGTH and STARTS[row][one] == STARTS[row][other]


def test_the_attention_mask_is_the_dense_table_of_the_rules() -> None:
    _, blocks = example(small_config())
    visible = visibility(blocks, LENGTH)
    width = max(len(own) for own in ANCHORS)
    for row, own in enumerate(ANCHORS):
        for query in range(width * BLOCK):
            block = query // BLOCK
            context = [
                block < len(own) and column < own[block] and same_document(row, column, own[block])
                for column in range(LENGTH)
            ]
            slots = [column // BLOCK == block for column in range(width * BLOCK)]
            assert visible[row, 0, query].tolist() == context + slots, (row, query)


@pytest.mark.parametrize("head", ["none", "gated", "rnn"])
def test_a_context_position_is_seen_by_the_later_blocks_of_its_document_and_by_no_other(head: str) -> None:
    config = small_config(head)
    batch, blocks = example(config)
    before, confidence = outputs(config, batch, blocks)
    for row, column in product(range(2), range(LENGTH)):
        taps = batch.taps_BSLH.clone()
        taps[row, column] += 1
        after, confidence_after = outputs(config, replace(batch, taps_BSLH=taps), blocks)
        seen = slots_where(lambda r, a, _, row=row, c=column: r == row and c < a and same_document(r, c, a))  # type: ignore[misc]
        assert changed(before, after) == seen, (row, column)
        if config.confidence:
            assert changed(confidence[..., None], confidence_after[..., None]) == seen, (row, column)


@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
def test_a_token_reaches_the_block_that_it_anchors_and_the_slots_that_follow_it(head: str) -> None:
    """Slot k's bias reads the token at a+k; the recurrent head remembers it for the slots behind."""
    config = small_config(head)
    batch, blocks = example(config)
    before, _ = outputs(config, batch, blocks)
    for row, column in product(range(2), range(LENGTH)):
        ids = batch.input_ids_BS.clone()
        ids[row, column] = (ids[row, column] + 1) % (config.vocab - 1)
        other = replace(batch, input_ids_BS=ids)
        after, _ = outputs(config, other, blocks_of(config, other))

        def reads(where: int, anchor: int, slot: int, row: int = row, column: int = column) -> bool:
            if where != row or not same_document(row, anchor, column):
                return False
            follows = {"none": False, "rnn": anchor <= column <= anchor + slot}.get(head, column == anchor + slot)
            return anchor == column or follows

        assert changed(before, after) == slots_where(reads), (row, column)


def test_the_input_of_a_slot_is_seen_by_its_whole_block_and_by_no_other() -> None:
    config = small_config("none")
    batch, blocks = example(config)
    drafter, vocabulary = small_drafter(config), small_vocabulary(config)
    inputs = vocabulary.embed(block_inputs(blocks, config.mask_token_id))

    def hidden(embeddings_BQH: Tensor) -> Tensor:
        with torch.no_grad():
            context = drafter.context(batch.taps_BSLH, batch.positions_BS)
            states = drafter(embeddings_BQH, blocks.positions_BAK.flatten(1), context, blocks.sight)
        return states.unflatten(1, (-1, BLOCK))

    before = hidden(inputs)
    for row, query in product(range(2), range(inputs.shape[1])):
        touched = inputs.clone()
        touched[row, query] += 1
        block = query // BLOCK
        assert changed(before, hidden(touched)) == {(row, block, slot) for slot in range(BLOCK)}


def test_a_final_state_teaches_the_slots_that_predict_the_token_behind_it() -> None:
    config = small_config("none")
    batch, blocks = example(config)
    vocabulary, slots = small_vocabulary(config), blocks.valid_BAK

    def taught(one: Batch) -> Tensor:
        distinct_PV, row_N = target_logits(vocabulary, one, blocks, slots)
        placed = torch.zeros(*slots.shape, config.vocab)
        placed[slots] = distinct_PV[row_N]
        return placed

    before = taught(batch)
    for row, column in product(range(2), range(LENGTH)):
        final = batch.final_BSH.clone()
        final[row, column] += 1
        # The last token of a document has no successor, so its state teaches nothing.
        expected = slots_where(
            lambda r, a, k, row=row, c=column: r == row and a + k == c and same_document(r, a, c + 1)  # type: ignore[misc]
        )
        assert changed(before, taught(replace(batch, final_BSH=final))) == expected, (row, column)


@pytest.mark.parametrize("head", HEADS)
def test_dummy_blocks_change_nothing_not_even_by_what_is_not_a_number(head: str) -> None:
    """The second row has one block beside three dummies; every embedding that no block needs is NaN, or is not."""
    config = small_config(head)
    batch = small_batch(config, [[1] * LENGTH, [1] * LENGTH])
    anchors = positions([1, 2, 5, 7], [4])
    needed = [config.mask_token_id, *batch.input_ids_BS[0, [1, 2, 5, 7]].tolist(), int(batch.input_ids_BS[1, 4])]
    found = []
    for filler in (0.0, float("nan")):
        vocabulary = small_vocabulary(config)
        needless_V = torch.ones(config.vocab, dtype=torch.bool)
        needless_V[needed] = False
        vocabulary.embedding_VH[needless_V] = filler
        blocks = make_blocks(batch.input_ids_BS, batch.loss_mask_BS, anchors, config.block, 4.0)
        module = DraftObjective(small_drafter(config), settings_of(config).loss)
        objective = module(vocabulary, batch, blocks, step_weight(blocks))
        objective.loss.backward()
        found.append((objective, [parameter.grad for parameter in module.parameters()]))
    (clean, clean_gradients), (broken, gradients) = found
    assert torch.equal(stack_means(broken.means), stack_means(clean.means))
    assert all(
        one is not None and other is not None and torch.equal(one, other)
        for one, other in zip(gradients, clean_gradients, strict=True)
    )


def test_only_columns_before_the_last_anchor_of_the_batch_are_projected() -> None:
    """What lies behind may hold anything; no anchor at all leaves one column, so that every weight has a gradient."""
    config = small_config()
    batch, blocks = example(config)
    expected, _ = outputs(config, batch, blocks)
    taps = batch.taps_BSLH.clone()
    # The last anchors of the documents are 2, 7 and 4.
    taps[0, 2:5] = taps[0, 7:] = taps[1, 4:] = float("nan")
    other = replace(batch, taps_BSLH=taps)
    assert torch.equal(outputs(config, other, blocks)[0], expected)
    nowhere = make_blocks(batch.input_ids_BS, batch.loss_mask_BS, positions([], []), config.block, None)
    for own, wanted in ((blocks, 7), (nowhere, 1)):
        drafter = small_drafter(config)
        projected: list[torch.Size] = []
        drafter.fc.register_forward_hook(lambda _, inputs, __, into=projected: into.append(inputs[0].shape))
        module = DraftObjective(drafter, settings_of(config).loss)
        module(small_vocabulary(config), other, own, torch.tensor(1.0)).loss.backward()
        assert projected == [(2, wanted, len(config.taps) * config.hidden)]
        assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
