"""An EAGLE-3 drafter's side of a round: token by token, each draft's state the feature of the next.

taps and following tokens of committed positions --rows--> keys and values, written once
row of the token before the anchor --layer over the store--> state --norm, head--> draft --its own row--> ... K drafts

Row t of the store joins the feature of position t with token t+1, so it can be written when that token is committed.
Rows of drafts are written behind them, and over them what verification leaves standing. Shape suffixes as in
`dspark.decoding.proposer`; R1 one position of each active row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.decoding.kv import context_store
from dspark.decoding.proposer import Proposal
from dspark.decoding.sampling import Sampler
from dspark.model.attention import Sight
from dspark.model.eagle3 import Eagle3Drafter
from dspark.model.few_rows import lay_out
from dspark.model.vocabulary import Vocabulary


class ChainProposer:
    """An EAGLE-3 drafter with the rows of every text that is being decoded."""

    def __init__(self, drafter: Eagle3Drafter, vocabulary: Vocabulary, rows: int) -> None:
        lay_out(drafter)
        self.drafter, self.vocabulary = drafter, vocabulary.narrowed(drafter.kept).for_few_rows()
        head = vocabulary.head_VH
        self.store = context_store(drafter.config, rows, head.device, head.dtype)
        # Feature of each row's last committed position, from which drafting starts.
        self.last_RH = torch.zeros(rows, drafter.config.hidden, device=head.device, dtype=head.dtype)

    def observe(self, rows_N: Tensor, positions_N: Tensor, taps_NLH: Tensor, following_N: Tensor) -> None:
        """Takes in the target's states [N, L*H] of committed tokens, and the committed tokens behind them.

        Positions of a row stand together and ascend.
        """
        feature_NH = self.drafter.features(taps_NLH)
        joined_N2H = self.drafter.join(feature_NH, self.vocabulary.embed(following_N))
        new = self.drafter.key_values(joined_N2H[None], positions_N[None])
        self.store.write(0, self.store.places(rows_N, positions_N), new)
        last_N = torch.ones_like(rows_N, dtype=torch.bool)
        last_N[:-1] = rows_N[1:] != rows_N[:-1]
        self.last_RH[rows_N[last_N]] = feature_NH[last_N]

    def propose(self, anchor_ids_R: Tensor, anchors: Sequence[int], slots: int, sampler: Sampler) -> Proposal:
        """Drafts the `slots` tokens that follow each row's anchor, all of whose earlier positions were observed."""
        count, longest = len(anchors), max(anchors)
        first_R1 = torch.tensor(anchors, device=anchor_ids_R.device)[:, None] - 1
        rows_R1 = torch.arange(count, device=anchor_ids_R.device)[:, None]
        state_R1H, token_R, tokens = self.last_RH[:count, None], anchor_ids_R, []
        for slot in range(slots):
            positions_R1 = first_R1 + slot
            joined_R12H = self.drafter.join(state_R1H, self.vocabulary.embed(token_R[:, None]))
            # The row of slot 0 was observed; writing it again as the others changes nothing.
            new = self.drafter.key_values(joined_R12H, positions_R1)
            (context,) = self.store.rooms(rows_R1, positions_R1, longest + slot)
            sight = Sight(torch.zeros_like(positions_R1), positions_R1)
            state_R1H = self.drafter(state_R1H, joined_R12H, positions_R1, context, new, sight)
            logits_RD = self.vocabulary.draft_logits(self.drafter.norm(state_R1H)[:, 0]).float()
            token_R = sampler.choose(logits_RD, slot, self.vocabulary)
            tokens.append(token_R)
        return Proposal(torch.stack(tokens, dim=1), None)

    def move(self, source: int, to: int, length: int) -> None:
        """Copies a row of `length` observed positions over another."""
        self.store.move(source, to, length)
        self.last_RH[to] = self.last_RH[source]
