"""The EAGLE-3 objective: chained steps on the drafter's own outputs, towards the target's distribution.

    taps, tokens --features, keys of all rows--> step 0 of the chains' rows --state, next token--> step 1 --> ...
    each step's states --norm, head--> soft cross-entropy against the target, acceptance

Nothing here reduces over ranks, logs or synchronises. Shape suffixes: B batch, S positions, A chains, K steps, N used
steps of the batch's chains, P distinct columns of the target under them, H hidden.
"""

import torch
from torch import Tensor, nn

from dspark.learning import LOGITS_MB
from dspark.model.attention import KeyValues, nothing
from dspark.model.eagle3 import Eagle3Drafter
from dspark.model.vocabulary import Vocabulary
from dspark.training.batch import Batch
from dspark.training.blocks import Blocks
from dspark.training.chains import Chains
from dspark.training.means import Mean, Means, weighted_mean
from dspark.training.objective import Objective, acceptance_means, seen_taps
from dspark.training.terms import Judged, judge
from dspark.training.workspace import Workspace


def run_chains(drafter: Eagle3Drafter, vocabulary: Vocabulary, batch: Batch, chains: Blocks) -> Tensor:
    """Normed states [B, A, K, H] of all steps, teacher-forced: step j reads the text's token t+1+j.

    A row at step j sees the rows up to its own at step 0, and of the later steps its own up to j: what decoding has in
    its store when it drafts from that row. Row t stands at position t+j then.
    """
    rows_BA, seen = (chains.anchors_BA - 1).clamp(min=0), slice(0, chains.reach)
    # The last row of a text has no token behind it but a stranger's. No chain sees it, nor any behind the last.
    feature_BSH = drafter.features(seen_taps(batch, chains))
    joined_BS2H = drafter.join(feature_BSH, vocabulary.embed(batch.input_ids_BS.roll(-1, dims=1)[:, seen]))
    context = drafter.key_values(joined_BS2H, batch.positions_BS[:, seen])
    later: list[KeyValues] = []
    state, joined = _rows(feature_BSH, rows_BA), _rows(joined_BS2H, rows_BA)
    states = []
    for step in range(chains.block):
        positions_BA = chains.positions_BAK[..., step] - 1
        if step:
            joined = drafter.join(state, vocabulary.embed(chains.previous_BAK[..., step]))
            later.append(drafter.key_values(joined, positions_BA))
        own = _by_row(later) if later else nothing(context)
        state = drafter(state, joined, positions_BA, context, own, chains.sight)
        states.append(drafter.norm(state))
    return torch.stack(states, dim=2)


def _rows(values_BSX: Tensor, rows_BA: Tensor) -> Tensor:
    return values_BSX.gather(1, rows_BA[..., None].expand(-1, -1, values_BSX.shape[-1]))


def _by_row(steps: list[KeyValues]) -> KeyValues:
    """Keys and values [B, G, A*E, D] of E steps, those of a row side by side."""
    keys, values = (torch.stack(parts, dim=3).flatten(2, 3) for parts in zip(*steps, strict=True))
    return KeyValues(keys, values)


def visible_rows(rows_BA: Tensor, starts_BA: Tensor, length: int, steps: int) -> Tensor:
    """Mask [B, 1, A, S + (K-1) A]: rows of step 0 from the text's first to the own one, then the own of later steps.

    One dense statement of the rule, for tests and pictures; training reads `Blocks.sight`.
    """
    columns_S = torch.arange(length, device=rows_BA.device)
    upto_BAS = (starts_BA[..., None] <= columns_S) & (columns_S <= rows_BA[..., None])
    own_AA = torch.eye(rows_BA.shape[1], dtype=torch.bool, device=rows_BA.device)
    return torch.cat((upto_BAS, own_AA.repeat(1, steps - 1).expand(len(rows_BA), -1, -1)), dim=-1).unsqueeze(1)


class Eagle3Objective(nn.Module):
    """The drafter with its loss as one module, the unit that a training engine wraps."""

    def __init__(self, drafter: Eagle3Drafter, logits_mb: int = LOGITS_MB) -> None:
        super().__init__()
        self.drafter = drafter
        self.budget = logits_mb * 2**20
        self.workspace = Workspace()

    def forward(self, vocabulary: Vocabulary, batch: Batch, chains: Chains, denominator: Tensor) -> Objective:
        """Loss = sum of weights times soft cross-entropies / denominator, that of the whole step (design section 5).

        With a reduced vocabulary the teacher is the target's softmax restricted to the kept tokens and renormalised;
        acceptance is that of the whole target, sum of min(p, q) over all tokens.
        """
        states_BAKH = run_chains(self.drafter, vocabulary, batch, chains)
        carries_BAK = chains.weights_BAK > 0
        slots = chains.used
        judged = Judged(
            vocabulary=vocabulary,
            final_PH=batch.final_BSH.flatten(0, 1)[slots.place_P],
            slots=slots,
            labels_N=None,
            weights_N=slots.of(chains.weights_BAK),
            ce=1.0,
            l1=0.0,
            budget=self.budget,
        )
        terms = judge(slots.of(states_BAKH), None, judged, self.workspace)
        ce_BAK, accept_BAK, greedy_BAK = (
            slots.scatter(values_N, carries_BAK.shape) for values_N in (terms.ce_N, terms.accept_N, terms.greedy_N)
        )
        means = {f"loss_step_{step}": weighted_mean(ce_BAK[..., step], carries_BAK[..., step])
                 for step in range(chains.block)}  # fmt: skip
        means["loss"] = Mean(terms.total.detach(), chains.divisor)
        means |= self._acceptance(chains, accept_BAK, greedy_BAK)
        return Objective(terms.total / denominator.clamp(min=1e-9), means)

    def _acceptance(self, chains: Chains, accept_BAK: Tensor, greedy_BAK: Tensor) -> Means:
        """The means of DSpark's blocks over the steps that a round decodes, and rates of the steps behind them."""
        drafts = min(self.drafter.config.block, chains.block)
        valid_BAK = chains.valid_BAK[..., :drafts]
        means = acceptance_means(valid_BAK, accept_BAK[..., :drafts] * valid_BAK, greedy_BAK[..., :drafts] & valid_BAK)
        return means | {
            f"accept_rate_{step}": weighted_mean(accept_BAK[..., step], chains.valid_BAK[..., step])
            for step in range(drafts, chains.block)
        }
