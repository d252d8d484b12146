"""One training pass over packed texts says what decoding says at each of its anchors, one block after the other.

The tokens are fed from the texts on both sides, so that every slot can be compared, for every form of the heads.
"""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from dspark.decoding.proposer import Proposer
from dspark.decoding.sampling import Sampler
from dspark.model.config import DSparkConfig
from dspark.model.vocabulary import Vocabulary
from dspark.training.blocks import make_blocks
from dspark.training.objective import draft_logits, run_drafter
from tests.dspark.small import HEADS, positions, small_batch, small_config, small_drafter, small_vocabulary

LENGTHS = (10, 8)
ANCHORS = ([1, 4, 5], [2, 3])  # far enough from the end that each block lies in its text
FORMS: dict[str, DSparkConfig] = {
    **{head: small_config(head) for head in HEADS},
    "reduced": replace(small_config("gated"), draft_vocab=20),
    **{f"{head}_state_alone": small_config(head, confidence_with_markov=False) for head in ("vanilla", "gated", "rnn")},
    "three_taps": small_config("rnn", taps=(-1, 0, 4), block=4),
}


@dataclass
class Reader(Sampler):
    """Chooses the text's own tokens, and remembers the logits that it was shown."""

    text: list[int]
    shown: list[Tensor]

    def choose(self, logits_RD: Tensor, slot: int, vocabulary: Vocabulary) -> Tensor:
        self.shown.append(logits_RD)
        return torch.tensor([self.text[slot]])


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_a_training_pass_over_packed_texts_equals_decoding_at_each_anchor(form: str) -> None:
    config = FORMS[form]
    drafter, vocabulary = small_drafter(config), small_vocabulary(config)
    if config.draft_vocab < config.vocab:
        drafter.keep(torch.arange(5, 25))
    starts = [0, LENGTHS[0]]
    batch = small_batch(config, [[1] * sum(LENGTHS)])
    batch = replace(batch, packed_starts_BS=torch.tensor(starts).repeat_interleave(torch.tensor(LENGTHS))[None])
    columns = [start + anchor for start, own in zip(starts, ANCHORS, strict=True) for anchor in own]
    blocks = make_blocks(
        batch.input_ids_BS, batch.loss_mask_BS, positions(columns), config.block, None, batch.packed_starts_BS
    )
    everything = torch.ones_like(blocks.valid_BAK)
    narrowed = vocabulary.narrowed(drafter.kept)
    output = run_drafter(drafter, narrowed, batch, blocks)
    trained_AKD = draft_logits(drafter, narrowed, output, everything).unflatten(0, (len(columns), config.block))

    proposer, block = Proposer(drafter, vocabulary, rows=1), 0
    proposer.store.reserve(max(LENGTHS))
    for start, length, anchors in zip(starts, LENGTHS, ANCHORS, strict=True):
        ids = batch.input_ids_BS[0, start : start + length].tolist()
        taps = batch.taps_BSLH[0, start : start + length]
        for anchor in anchors:
            rows, following = torch.zeros(anchor, dtype=torch.int64), torch.tensor(ids[1 : anchor + 1])
            proposer.observe(rows, torch.arange(anchor), taps[:anchor], following)
            reader = Reader(ids[anchor + 1 :], [])
            proposal = proposer.propose(torch.tensor([ids[anchor]]), [anchor], config.block, reader)
            torch.testing.assert_close(torch.cat(reader.shown), trained_AKD[block], rtol=0, atol=2e-5)
            if config.confidence:
                assert output.confidence_BAK is not None and proposal.confidences_RK is not None
                confidence_K = output.confidence_BAK[0, block].sigmoid()
                torch.testing.assert_close(proposal.confidences_RK[0], confidence_K, rtol=0, atol=1e-5)
            else:
                assert proposal.confidences_RK is None
            block += 1
    assert block == len(columns)


def test_every_block_of_the_example_lies_in_its_text() -> None:
    for form, (length, anchors) in product(FORMS.values(), zip(LENGTHS, ANCHORS, strict=True)):
        assert max(anchors) + form.block < length
