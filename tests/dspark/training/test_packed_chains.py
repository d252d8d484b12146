"""Packed EAGLE-3 chains: no document reads, feeds or labels another, and a step is that of the rows alone."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.learning import Eagle3Settings
from dspark.training.batch import Batch, Place
from dspark.training.chains import Chains, chain_anchors, make_chains
from dspark.training.eagle3 import Eagle3Objective, run_chains, visible_rows
from dspark.training.means import add_means, stack_means
from dspark.training.share import Share, placed
from tests.dspark.small import SMALL_EAGLE3, small_batch, small_eagle3, small_vocabulary
from tests.dspark.training.shares import captured, chain_settings_of, share_of

# Supervised up to their ends, so that labels would run on into the next document; two have no chain at all.
MASKS = [[0, 1, 1, 1, 1], [1, 1, 1], [0, 0, 0, 0], [0, 1, 1, 0, 1, 1, 1, 1, 1], [1], [1, 1, 1, 1, 1, 1, 1]]
LENGTHS = (5, 4, 6)
PLACES = [Place(0, 0), Place(0, 5), Place(0, 9)]
STEPS = 3


def packed_row(alignment: Any = "aligned") -> tuple[Batch, Chains]:
    """A row of three documents of 5, 4 and 6 tokens and two columns of padding, all of it supervised."""
    settings = Eagle3Settings(ttt_length=STEPS, step_loss_decay=0.5, mask_alignment=alignment)
    batch = small_batch(SMALL_EAGLE3, [[1] * sum(LENGTHS) + [0] * 2])
    starts = torch.tensor([[0] * 5 + [5] * 4 + [9] * 8])
    batch = replace(batch, packed_starts_BS=starts)
    anchors = placed([chain_anchors(np.ones(length, np.uint8), settings) for length in LENGTHS], PLACES)
    return batch, make_chains(batch, anchors, LENGTHS, settings, PLACES)


def test_three_documents_of_a_row_by_hand() -> None:
    _, chains = packed_row()
    # A document's first position has no row, its last but one predicts nothing that is left.
    assert chains.anchors_BA.tolist() == [[1, 2, 3, 6, 7, 10, 11, 12, 13]]
    assert chains.positions_BAK[0, :, 0].tolist() == [1, 2, 3, 1, 2, 1, 2, 3, 4]
    assert chains.valid_BAK[0].sum(-1).tolist() == [3, 2, 1, 2, 1, 3, 3, 2, 1]
    # Three, two and four rows at step 0; two, one and three at step 1; one, none and two at step 2.
    thirds = [1 / 3] * 3 + [1 / 2] * 2 + [1 / 4] * 4
    assert chains.weights_BAK[0, :, 0].tolist() == pytest.approx(thirds)
    assert chains.weights_BAK[0].sum(0).tolist() == pytest.approx([3, 3 * 0.5, 2 * 0.25])
    assert chains.divisor.item() == 3
    rows_BA = chains.anchors_BA - 1
    seen = visible_rows(rows_BA, chains.starts_BA, 17, STEPS)[0, 0, :, :17].int()
    assert [row.nonzero()[:, 0].tolist() for row in seen] == [
        list(range(start, row + 1))
        for row, start in zip(rows_BA[0].tolist(), chains.starts_BA[0].tolist(), strict=True)
    ]
    assert torch.equal(chains.sight.mask(1, 17, 0)[0, 0].int(), seen)


def test_an_unshifted_mask_ends_with_its_document_too() -> None:
    _, chains = packed_row("published")
    # Token t+1+j must exist in the document: anchors up to its last token, and as many steps as are left.
    assert chains.anchors_BA.tolist() == [[1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 13, 14]]
    assert (chains.weights_BAK[0] > 0).sum(-1).tolist() == [3, 3, 2, 1, 3, 2, 1, 3, 3, 3, 2, 1]


Cell = tuple[int, int]


def changed(before: Tensor, after: Tensor) -> set[Cell]:
    """Chain and step of the states [1, A, K, H] that differ in any bit."""
    return {(chain, step) for _, chain, step in (before != after).any(-1).nonzero().tolist()}


@torch.no_grad()
def test_each_cell_of_a_row_reaches_the_chains_of_its_document_that_may_see_it_and_no_other() -> None:
    batch, chains = packed_row()
    drafter, vocabulary = small_eagle3(), small_vocabulary(SMALL_EAGLE3)
    before = run_chains(drafter, vocabulary, batch, chains)
    anchors, starts = chains.anchors_BA[0].tolist(), chains.starts_BA[0].tolist()
    cells = list(product(range(len(anchors)), range(STEPS)))
    for column, start in enumerate(batch.starts_BS[0].tolist()):
        taps = batch.taps_BSLH.clone()
        taps[0, column] += 1
        after = run_chains(drafter, vocabulary, replace(batch, taps_BSLH=taps), chains)
        seen = {(chain, step) for chain, step in cells if starts[chain] == start and column < anchors[chain]}
        assert changed(before, after) == seen, column
        ids = batch.input_ids_BS.clone()
        ids[0, column] = (ids[0, column] + 1) % SMALL_EAGLE3.vocab
        other = replace(batch, input_ids_BS=ids)
        remade = make_chains(other, [chains.anchors_BA[0].numpy()], LENGTHS, Eagle3Settings(ttt_length=STEPS), PLACES)
        # The row of position t holds token t+1, so a document's first token is in none; padding is no document's start.
        read = {
            (chain, step) for chain, step in cells if starts[chain] == start and start < column <= anchors[chain] + step
        }
        assert changed(before, run_chains(drafter, vocabulary, other, remade)) == read, column


@pytest.mark.parametrize("alignment", ["aligned", "published"])
def test_a_document_s_loss_reads_its_own_target_states_and_no_others(alignment: str) -> None:
    batch, chains = packed_row(alignment)
    module, vocabulary = Eagle3Objective(small_eagle3()), small_vocabulary(SMALL_EAGLE3)
    for document, start in enumerate((0, 5, 9)):
        own = replace(chains, weights_BAK=chains.weights_BAK * (chains.starts_BA == start)[..., None])
        expected = module(vocabulary, batch, own, chains.divisor).loss
        columns = torch.arange(17)
        inside = (columns >= start) & (columns < start + LENGTHS[document])
        for name in ("final_BSH", "taps_BSLH", "input_ids_BS"):
            value = getattr(batch, name)
            others = torch.where(inside.view(1, -1, *[1] * (value.ndim - 2)), value, (value + 1) % 7)
            assert module(vocabulary, replace(batch, **{name: others}), own, chains.divisor).loss == expected, name


def step_of(share: Share) -> tuple[list[float], Tensor, dict[str, Tensor]]:
    """Loss of each micro-batch over the step's weight, all metrics, and the step's gradients."""
    module, vocabulary = Eagle3Objective(small_eagle3()), small_vocabulary(SMALL_EAGLE3)
    objectives = [
        module(vocabulary, batch, chains, share.weights.sum())
        for batch, chains in zip(share.batches, share.blocks, strict=True)
    ]
    losses = torch.stack([objective.loss for objective in objectives])
    names, parameters = zip(*module.drafter.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(losses.sum(), parameters), strict=True))
    means = stack_means(add_means([share.counts, *(objective.means for objective in objectives)]))
    return losses.tolist(), means, gradients


@pytest.mark.parametrize(
    ("alignment", "normaliser", "broken"),
    [("aligned", "sequences", []), ("published", "sequences", [3]), ("published", "published", [])],
)
def test_a_packed_step_equals_the_step_of_rows_alone(alignment: Any, normaliser: Any, broken: list[int]) -> None:
    chains = Eagle3Settings(ttt_length=4, step_loss_decay=0.5, mask_alignment=alignment, normaliser=normaliser)
    table, counted = captured(SMALL_EAGLE3, MASKS, broken), [not broken] + [True] * 5
    alone, packed = (
        share_of(
            table,
            SMALL_EAGLE3,
            chain_settings_of(SMALL_EAGLE3, chains, global_batch=6, micro_batch=3, pack_tokens=tokens),
            counted,
        )
        for tokens in (None, 16)
    )
    assert [len(batch.input_ids_BS) for batch in (*alone.batches, *packed.batches)] == [3, 3, 1, 2]
    assert torch.equal(packed.weights, alone.weights) and packed.tokens == alone.tokens
    losses, means, gradients = step_of(alone)
    found, found_means, found_gradients = step_of(packed)
    assert min(losses) > 0.1 and found == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(found_means, means, rtol=1e-6, atol=1e-6)
    for name, gradient in found_gradients.items():
        scale = gradients[name].abs().max().item()
        torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-6 * max(1.0, scale))
