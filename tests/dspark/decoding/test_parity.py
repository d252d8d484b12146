"""One training pass over packed texts says what decoding says at each of its anchors, one block after the other.

The tokens are fed from the texts on both sides, so that every slot can be compared, for every form of DSpark's heads
and of EAGLE-3's layer.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

from dspark.decoding.chains import ChainProposer
from dspark.decoding.proposer import Proposer
from dspark.learning import Eagle3Settings
from dspark.model.config import DraftConfig, DSparkConfig
from dspark.training.batch import Batch, Place
from dspark.training.blocks import make_blocks
from dspark.training.chains import make_chains
from dspark.training.eagle3 import run_chains
from dspark.training.objective import draft_logits, run_drafter
from tests.dspark.decoding.decoders import Reader
from tests.dspark.small import (
    EAGLE3_FORMS,
    HEADS,
    positions,
    small_batch,
    small_config,
    small_drafter,
    small_eagle3,
    small_vocabulary,
)

LENGTHS = (10, 8)
ANCHORS = ([1, 4, 5], [2, 3])  # far enough from the end that each block lies in its text
STARTS = (0, LENGTHS[0])
COLUMNS = [start + anchor for start, own in zip(STARTS, ANCHORS, strict=True) for anchor in own]
FORMS: dict[str, DSparkConfig] = {
    **{head: small_config(head) for head in HEADS},
    "reduced": replace(small_config("gated"), draft_vocab=20),
    **{f"{head}_state_alone": small_config(head, confidence_with_markov=False) for head in ("vanilla", "gated", "rnn")},
    "three_taps": small_config("rnn", taps=(-1, 0, 4), block=4),
}


def two_texts(config: DraftConfig) -> Batch:
    """Both texts packed into one row."""
    batch = small_batch(config, [[1] * sum(LENGTHS)])
    return replace(batch, packed_starts_BS=torch.tensor(STARTS).repeat_interleave(torch.tensor(LENGTHS))[None])


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_a_training_pass_over_packed_texts_equals_decoding_at_each_anchor(form: str) -> None:
    config = FORMS[form]
    drafter, vocabulary = small_drafter(config), small_vocabulary(config)
    if config.draft_vocab < config.vocab:
        drafter.keep(torch.arange(5, 25))
    batch = two_texts(config)
    blocks = make_blocks(
        batch.input_ids_BS, batch.loss_mask_BS, positions(COLUMNS), config.block, None, batch.packed_starts_BS
    )
    everything = torch.ones_like(blocks.valid_BAK)
    narrowed = vocabulary.narrowed(drafter.kept)
    output = run_drafter(drafter, narrowed, batch, blocks)
    trained_AKD = draft_logits(drafter, narrowed, output, everything).unflatten(0, (len(COLUMNS), config.block))

    proposer, block = Proposer(drafter, vocabulary, rows=1), 0
    proposer.store.reserve(max(LENGTHS))
    for start, length, anchors in zip(STARTS, LENGTHS, ANCHORS, strict=True):
        ids = batch.input_ids_BS[0, start : start + length].tolist()
        taps = batch.taps_BSLH[0, start : start + length]
        for anchor in anchors:
            rows, following = torch.zeros(anchor, dtype=torch.int64), torch.tensor(ids[1 : anchor + 1])
            proposer.observe(rows, torch.arange(anchor), taps[:anchor], following)
            reader = Reader(ids[anchor + 1 :], [])
            proposal = proposer.propose(torch.tensor([ids[anchor]]), [anchor], config.block, reader)
            torch.testing.assert_close(torch.cat(reader.shown), trained_AKD[block], rtol=0, atol=2e-5)
            if config.confidence:
                assert output.confidence_BAK is not None and proposal.confidence_RK is not None
                confidence_K = output.confidence_BAK[0, block]
                torch.testing.assert_close(proposal.confidence_RK[0], confidence_K, rtol=0, atol=1e-5)
            else:
                assert proposal.confidence_RK is None
            block += 1
    assert block == len(COLUMNS)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("form", EAGLE3_FORMS)
@torch.inference_mode()
def test_chains_over_packed_texts_equal_step_by_step_decoding_at_each_anchor(form: str, reduced: bool) -> None:
    config = replace(EAGLE3_FORMS[form], draft_vocab=20 if reduced else 30)
    drafter, vocabulary = small_eagle3(config), small_vocabulary(config)
    if reduced:
        drafter.keep(torch.arange(5, 25))
    batch = two_texts(config)
    places = [Place(0, start) for start in STARTS]
    chains = make_chains(batch, positions(COLUMNS), LENGTHS, Eagle3Settings(ttt_length=config.block), places)
    narrowed = vocabulary.narrowed(drafter.kept)
    trained_AKD = narrowed.draft_logits(run_chains(drafter, narrowed, batch, chains)[0])

    # One store for both texts, each anchor over what the one before it has left behind.
    proposer, found = ChainProposer(drafter, vocabulary, rows=1), []
    proposer.store.reserve(max(LENGTHS))
    for start, length, anchors in zip(STARTS, LENGTHS, ANCHORS, strict=True):
        ids = batch.input_ids_BS[0, start : start + length].tolist()
        for anchor in anchors:
            rows, following = torch.zeros(anchor, dtype=torch.int64), torch.tensor(ids[1 : anchor + 1])
            proposer.observe(rows, torch.arange(anchor), batch.taps_BSLH[0, start : start + anchor], following)
            reader = Reader(ids[anchor + 1 :], [])
            proposer.propose(torch.tensor([ids[anchor]]), [anchor], config.block, reader)
            found.append(torch.cat(reader.shown))
    torch.testing.assert_close(torch.stack(found), trained_AKD, rtol=0, atol=2e-5)


def test_every_block_of_the_example_lies_in_its_text() -> None:
    for form, (length, anchors) in product(FORMS.values(), zip(LENGTHS, ANCHORS, strict=True)):
        assert max(anchors) + form.block < length
