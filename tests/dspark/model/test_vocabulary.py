"""Which tokens a reduced vocabulary keeps, and the maps between them and the target's."""

import numpy as np
import pytest
import torch
from torch import Tensor, tensor

from dspark.errors import InputError
from dspark.model.drafter import new_drafter
from dspark.model.vocabulary import Vocabulary, keep_tokens
from tests.dspark.small import small_config

KEPT = tensor([0, 3, 4, 9])


def vocabulary(kept: Tensor | None = KEPT) -> Vocabulary:
    return Vocabulary(torch.arange(20.0).view(10, 2), torch.arange(20.0, 40.0).view(10, 2)).narrowed(kept)


def test_the_most_frequent_tokens_are_kept_ascending_and_the_special_ones_always() -> None:
    counts = np.array([5, 0, 9, 1, 7, 7, 0])
    assert keep_tokens(counts, 3, ()).tolist() == [2, 4, 5]
    assert keep_tokens(counts, 4, (6, 1)).tolist() == [1, 2, 4, 6]
    assert keep_tokens(counts, 5, (2,)).tolist() == [0, 2, 3, 4, 5]
    assert keep_tokens(counts, 7, ()).tolist() == list(range(7))
    assert counts.tolist() == [5, 0, 9, 1, 7, 7, 0]


@pytest.mark.parametrize(("size", "always", "named"), [(8, (), "exceeds"), (2, (0, 1, 2), "no room")])
def test_a_size_that_cannot_be_met_exactly_is_refused(size: int, always: tuple[int, ...], named: str) -> None:
    with pytest.raises(InputError, match=f"drafter.vocab={size} .*{named}"):
        keep_tokens(np.ones(7, dtype=np.int64), size, always)


def test_places_and_tokens_are_inverse_and_other_tokens_are_told() -> None:
    reduced = vocabulary()
    assert reduced.tokens(tensor([[3, 0], [1, 2]])).tolist() == [[9, 0], [3, 4]]
    places, kept = reduced.draft_ids(torch.arange(10))
    assert kept.nonzero()[:, 0].tolist() == KEPT.tolist()
    assert places[kept].tolist() == [0, 1, 2, 3]


def test_draft_logits_are_the_columns_of_the_target_head_and_spread_back_to_their_tokens() -> None:
    reduced, hidden = vocabulary(), tensor([[1.0, -2.0]])
    drafted, whole = reduced.draft_logits(hidden), reduced.logits(hidden)
    assert torch.equal(drafted, reduced.of_kept(whole))
    spread = reduced.spread(drafted)
    assert torch.equal(spread[:, KEPT], drafted)
    assert spread.isneginf().sum() == 6


def test_a_whole_vocabulary_maps_every_token_to_itself() -> None:
    whole, logits = vocabulary(None), torch.randn(2, 10)
    assert whole.tokens(KEPT) is KEPT and whole.of_kept(logits) is logits and whole.spread(logits) is logits
    places, kept = whole.draft_ids(KEPT)
    assert places is KEPT and bool(kept.all())


def test_another_type_keeps_tied_weights_and_kept_tokens() -> None:
    table = torch.randn(10, 2)
    moved = Vocabulary(table, table).narrowed(KEPT).to(torch.device("cpu"), torch.bfloat16)
    assert moved.head_VH.data_ptr() == moved.embedding_VH.data_ptr()
    assert torch.equal(moved.draft_head_DH, table.bfloat16()[KEPT])


def test_a_drafter_carries_its_tokens_in_the_form_of_the_serving_engines() -> None:
    drafter = new_drafter(small_config(vocab=10, draft_vocab=4, mask_token_id=8), 0, KEPT)
    state = drafter.state_dict()
    assert state["d2t"].tolist() == [0, 2, 2, 6]
    assert state["t2d"].tolist() == [True, False, False, True, True, False, False, False, False, True]
    assert drafter.kept is not None and drafter.kept.tolist() == KEPT.tolist()
    assert state["markov_head.markov_w2.weight"].shape[0] == 4
    assert new_drafter(small_config(), 0).kept is None
