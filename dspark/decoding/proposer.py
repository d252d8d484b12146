"""The drafter's side of a round: observe what is committed, propose what may follow.

taps of committed tokens --context--> keys and values, written once
[anchor, mask, ...] --one pass over context and block--> states --head--> base logits --Markov head by slot--> drafts

Shape suffixes: R active rows, K slots of the pass, N committed positions of any rows, L taps, H hidden width, r rank,
D tokens that may be drafted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.decoding.kv import context_store
from dspark.decoding.sampling import Sampler
from dspark.model.attention import Sight
from dspark.model.drafter import Drafter
from dspark.model.few_rows import lay_out
from dspark.model.vocabulary import Vocabulary


@dataclass(frozen=True)
class Proposal:
    """Draft tokens [R, slots], and for each the logit that it is accepted if those before it are, in fp32."""

    tokens_RK: Tensor
    confidence_RK: Tensor | None


class Proposer:
    """A drafter with the context of every row that is being decoded."""

    def __init__(self, drafter: Drafter, vocabulary: Vocabulary, rows: int) -> None:
        lay_out(drafter)
        self.drafter, self.vocabulary = drafter, vocabulary.narrowed(drafter.kept).for_few_rows()
        self.store = context_store(drafter.config, rows, vocabulary.head_VH.device, vocabulary.head_VH.dtype)

    def observe(self, rows_N: Tensor, positions_N: Tensor, taps_NLH: Tensor, _following_N: Tensor) -> None:
        """Takes in the target's states [N, L*H] of committed tokens, at these rows and positions.

        The tokens behind them are for drafters of other kinds: blocks read tokens from the anchor on.
        """
        places_N = self.store.places(rows_N, positions_N)
        for number, new in enumerate(self.drafter.context(taps_NLH[None], positions_N[None])):
            self.store.write(number, places_N, new)

    def move(self, source: int, to: int, length: int) -> None:
        """Copies a row of `length` observed positions over another."""
        self.store.move(source, to, length)

    def propose(self, anchor_ids_R: Tensor, anchors: Sequence[int], slots: int, sampler: Sampler) -> Proposal:
        """Drafts the `slots` tokens that follow each row's anchor, whose context ends just before the anchor."""
        # Contiguous, or a batched product would read the head once per row.
        states_RKH = self._states(anchor_ids_R, anchors)[:, :slots].contiguous()
        logits_RKD = self.vocabulary.draft_logits(states_RKH)
        head = self.drafter.markov_head
        previous_R, carried, tokens, embedded = anchor_ids_R, None, [], []
        for slot in range(slots):
            logits_RD = logits_RKD[:, slot].float()
            if head is not None:
                e_Rr = head.embed(previous_R)
                features_Rr, carried = head.step(e_Rr, states_RKH[:, slot], carried)
                logits_RD = logits_RD + head.bias(features_Rr).float()
                embedded.append(e_Rr)
            previous_R = sampler.choose(logits_RD, slot, self.vocabulary)
            tokens.append(previous_R)
        return Proposal(torch.stack(tokens, dim=1), self._confidence(states_RKH, embedded))

    def _states(self, anchor_ids_R: Tensor, anchors: Sequence[int]) -> Tensor:
        """Normed states [R, K, H] of whole blocks: slots see each other, so all K run however few are used."""
        config, device = self.drafter.config, anchor_ids_R.device
        anchors_R1 = torch.tensor(anchors, device=device)[:, None]
        ids_RK = torch.full((len(anchors), config.block), config.mask_token_id, device=device)
        ids_RK[:, 0] = anchor_ids_R
        # The block's own keys stand at its positions, where no feature is yet, until a later round writes over them.
        positions_RK = anchors_R1 + torch.arange(config.block, device=device)
        rows_R1 = torch.arange(len(anchors), device=device)[:, None]
        context = self.store.rooms(rows_R1, positions_RK, max(anchors) + config.block)
        below = Sight(torch.zeros_like(anchors_R1), anchors_R1)
        states_RKH: Tensor = self.drafter(self.vocabulary.embed(ids_RK), positions_RK, context, below)
        return states_RKH

    def _confidence(self, states_RKH: Tensor, embedded: list[Tensor]) -> Tensor | None:
        head = self.drafter.confidence_head
        if head is None:
            return None
        logits_RK: Tensor = head(states_RKH, torch.stack(embedded, dim=1) if embedded else None)
        return logits_RK.float()
