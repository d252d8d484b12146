"""Which rows of a text are trained at which step, and what they weigh."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dspark.learning import Eagle3Settings
from dspark.training.chains import Chains, chain_anchors, make_chains
from dspark.training.eagle3 import visible_rows
from tests.dspark.plain_eagle3 import carries
from tests.dspark.small import SMALL_EAGLE3, small_batch


def chains_of(masks: list[list[int]], **settings: Any) -> tuple[list[NDArray[np.int64]], Chains]:
    wanted = Eagle3Settings(ttt_length=3, step_loss_decay=0.5, **settings)
    anchors = [chain_anchors(np.array(mask, np.uint8), wanted) for mask in masks]
    return anchors, make_chains(small_batch(SMALL_EAGLE3, masks), anchors, [len(mask) for mask in masks], wanted)


def test_a_chain_carries_loss_as_far_as_its_tokens_are_supervised() -> None:
    # Rows 1 and 2 (anchors 2 and 3): the feature of the last prompt token is where drafting starts.
    anchors, chains = chains_of([[0, 0, 1, 1, 1, 0]])
    assert anchors[0].tolist() == [2, 3]
    assert chains.valid_BAK.tolist() == [[[True, True, False], [True, False, False]]]
    # Two rows at step 0, one at step 1, whose decay is 0.5.
    assert chains.weights_BAK.tolist() == [[[0.5, 0.5, 0], [0.5, 0, 0]]]
    assert chains.divisor.item() == 1


def test_an_unshifted_mask_trains_other_rows_and_never_the_one_from_which_drafting_starts() -> None:
    anchors, chains = chains_of([[0, 0, 1, 1, 1, 0]], mask_alignment="published")
    # Row t counts at step j with token t+j: rows 0 and 1 from their second and third step on.
    assert anchors[0].tolist() == [1, 2, 3, 4, 5]
    carried = chains.weights_BAK[0] > 0
    assert carried.tolist() == [
        [False, False, True],
        [False, True, True],
        [True, True, True],
        [True, True, False],
        [True, False, False],
    ]
    # Metrics are still those of decoding.
    assert chains.valid_BAK[0].sum(1).tolist() == [0, 2, 1, 0, 0]


def test_sequences_weigh_the_same_and_those_without_rows_do_not_count() -> None:
    _, chains = chains_of([[1] * 8, [0, 1, 1], [1, 0, 1, 0, 1]])
    assert chains.weights_BAK.sum(1).tolist() == [[1, 0.5, 0.25], [1, 0, 0], [0, 0, 0]]
    assert chains.divisor.item() == 2


def test_the_published_normaliser_divides_by_all_tokens() -> None:
    _, chains = chains_of([[1] * 8, [0, 1, 1], [1, 0, 1, 0, 1]], normaliser="published")
    assert chains.weights_BAK.sum(1).tolist() == [[6, 2.5, 1], [1, 0, 0], [0, 0, 0]]
    assert chains.divisor.item() == 8 + 3 + 5


@pytest.mark.parametrize("alignment", ["aligned", "published"])
def test_every_mask_of_six_tokens_is_read_by_the_words_of_the_rule(alignment: str) -> None:
    masks = [[number >> bit & 1 for bit in range(6)] for number in range(64)]
    # One row too long, so that every other is padded.
    anchors, chains = chains_of([*masks, [0] * 9], mask_alignment=alignment)
    for number, mask in enumerate(masks):
        found = {
            (int(anchor) - 1, step)
            for place, anchor in enumerate(anchors[number])
            for step in torch.nonzero(chains.weights_BAK[number, place])[:, 0].tolist()
        }
        wanted = {(row, step) for row in range(6) for step in range(3) if carries(mask, row, step, alignment)}
        assert found == wanted, mask
        used = {
            (int(anchor) - 1, step)
            for place, anchor in enumerate(anchors[number])
            for step in torch.nonzero(chains.valid_BAK[number, place])[:, 0].tolist()
        }
        # What decoding asks for is measured under either rule.
        assert used == {(row, step) for row in range(6) for step in range(3) if carries(mask, row, step, "aligned")}


def test_what_is_trained_or_measured_is_listed_on_the_host() -> None:
    _, chains = chains_of([[0, 0, 1, 1, 1, 0], [0, 1, 1]], mask_alignment="published")
    used_BAK = (chains.weights_BAK > 0) | chains.valid_BAK
    assert used_BAK[0].tolist() != chains.valid_BAK[0].tolist()
    assert sorted(chains.used.index_N.tolist()) == used_BAK.flatten().nonzero().flatten().tolist()
    columns_BAK = torch.arange(2)[:, None, None] * 6 + chains.columns_BAK
    assert torch.equal(chains.used.place_P[chains.used.row_N], columns_BAK.flatten()[chains.used.index_N])


def test_a_chain_sees_the_rows_up_to_its_own() -> None:
    masks = [[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
    _, chains = chains_of(masks)
    dense = visible_rows(chains.anchors_BA - 1, chains.starts_BA, length=6, steps=1)
    ranged = chains.sight.mask(slots=1, context=6, own=0)
    kept = chains.keep_BA[:, None, :, None].expand_as(dense)
    assert torch.equal(ranged[kept], dense[kept])
    assert not ranged[~kept].any() and not kept.all()
