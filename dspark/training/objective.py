"""The DSpark objective over the supervised slots of a batch (paper section 3.3, equations 8 to 12).

Nothing here reduces over ranks, logs or synchronises: sums and weights are returned, the caller divides.
Shape suffixes: B batch, A blocks, K slots, N supervised slots of the batch, P distinct columns under them, V tokens,
D tokens that may be drafted (D = V unless the drafter's vocabulary is reduced), H hidden, S context, r rank.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.learning import LOGITS_MB, LossSettings
from dspark.model.drafter import Drafter
from dspark.model.vocabulary import Vocabulary
from dspark.training.batch import Batch
from dspark.training.blocks import Blocks, block_inputs
from dspark.training.means import Mean, Means, weighted_mean
from dspark.training.slots import Slots
from dspark.training.terms import Judged, MarkovBias, judge
from dspark.training.workspace import Workspace


@dataclass(frozen=True)
class DraftOutput:
    """What the drafter says of a batch's blocks. Slots that are not supervised are computed but mean nothing."""

    hidden_BAKH: Tensor
    features_BAKr: Tensor | None  # input of the Markov bias; None without a Markov head
    confidence_BAK: Tensor | None  # logits, fp32


@dataclass(frozen=True)
class Objective:
    """One micro-batch: the loss to differentiate, and every metric as (sum, weight)."""

    loss: Tensor
    means: Means


def run_drafter(drafter: Drafter, vocabulary: Vocabulary, batch: Batch, blocks: Blocks) -> DraftOutput:
    """One parallel pass over all blocks of the batch, teacher-forced."""
    context = drafter.context(seen_taps(batch, blocks), batch.positions_BS[:, : blocks.reach])
    hidden_BQH = drafter(
        vocabulary.embed(block_inputs(blocks, drafter.config.mask_token_id)),
        blocks.positions_BAK.flatten(1),
        context,
        blocks.sight,
    )
    hidden_BAKH = hidden_BQH.unflatten(1, (-1, blocks.block))
    embedded, features = None, None
    if drafter.markov_head is not None:
        embedded = drafter.markov_head.embed(blocks.previous_BAK)
        features = drafter.markov_head.block_features(embedded, hidden_BAKH)
    confidence = None
    if drafter.confidence_head is not None:
        confidence = drafter.confidence_head(hidden_BAKH, embedded).float()
    return DraftOutput(hidden_BAKH, features, confidence)


def seen_taps(batch: Batch, blocks: Blocks) -> Tensor:
    """Taps [B, R, L*H] of the columns before the batch's last anchor; zeros from each document's last anchor on.

    No block looks at either. Columns behind the last anchor of all are left out, so that no layer projects them. Those
    between documents, and behind a row's own last anchor, are projected with the rest, and a value there that is not a
    number would reach the weights: their gradient sums over all columns, and 0 x NaN is NaN.
    """
    starts_BS = batch.starts_BS
    anchors_BA = torch.where(blocks.keep_BA, blocks.anchors_BA, 0)
    # At each document's first column, its last anchor; 0 for a document without one.
    last_BS = torch.zeros_like(starts_BS).scatter_reduce(1, blocks.starts_BA, anchors_BA, "amax")
    columns_S = torch.arange(starts_BS.shape[1], device=starts_BS.device)
    hidden_BS = columns_S >= last_BS.gather(1, starts_BS)
    seen = slice(0, blocks.reach)
    return batch.taps_BSLH[:, seen].masked_fill(hidden_BS[:, seen, None], 0)


def draft_logits(drafter: Drafter, vocabulary: Vocabulary, output: DraftOutput, slots: Tensor) -> Tensor:
    """Draft logits [N, D] in fp32 of the slots selected by the mask `slots` [B, A, K], all at once.

    Training never holds them (`dspark.training.terms`); they are for comparisons.
    """
    logits_ND = vocabulary.draft_logits(output.hidden_BAKH[slots]).float()
    if drafter.markov_head is not None:
        assert output.features_BAKr is not None
        logits_ND = logits_ND + drafter.markov_head.bias(output.features_BAKr[slots]).float()
    return logits_ND


def target_logits(vocabulary: Vocabulary, batch: Batch, blocks: Blocks, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The target's logits in fp32 for the tokens that the selected slots predict: row a+k of `final`.

    Logits [P, V] of the distinct columns, and for each of the N slots its row in them. For comparisons, as above.
    """
    length = batch.input_ids_BS.shape[1]
    rows_N = torch.arange(len(slots), device=slots.device)[:, None, None].expand_as(slots)[slots]
    places_P, row_N = torch.unique(rows_N * length + blocks.columns_BAK[slots], return_inverse=True)
    return vocabulary.logits(batch.final_BSH.flatten(0, 1)[places_P]).float(), row_N


def step_weight(blocks: Blocks) -> Tensor:
    """Sum of the slot weights: this batch's part of the denominator, known before any forward."""
    return blocks.weights_BAK.sum()


class DraftObjective(nn.Module):
    """The drafter with its loss as one module, the unit that a training engine wraps."""

    def __init__(self, drafter: Drafter, settings: LossSettings, logits_mb: int = LOGITS_MB) -> None:
        super().__init__()
        self.drafter = drafter
        self.settings = settings
        self.budget = logits_mb * 2**20
        self.workspace = Workspace()

    def forward(self, vocabulary: Vocabulary, batch: Batch, blocks: Blocks, denominator: Tensor) -> Objective:
        """Loss = (ce sum + l1 sum + confidence sum, each times its setting) / denominator.

        `denominator` is the sum of slot weights that the caller chose (design section 4: over the whole step).
        """
        output = run_drafter(self.drafter, vocabulary, batch, blocks)
        slots = blocks.used
        weights_N = slots.of(blocks.weights_BAK)
        judged = Judged(
            vocabulary=vocabulary,
            final_PH=batch.final_BSH.flatten(0, 1)[slots.place_P],
            slots=slots,
            labels_N=slots.of(blocks.labels_BAK),
            weights_N=weights_N,
            ce=self.settings.ce,
            l1=self.settings.l1,
            budget=self.budget,
        )
        terms = judge(slots.of(output.hidden_BAKH), self._bias(output, slots), judged, self.workspace)
        total, losses = terms.total, {"ce": terms.ce_N, "l1": terms.l1_N}
        if output.confidence_BAK is not None:
            losses["confidence"] = F.binary_cross_entropy_with_logits(
                slots.of(output.confidence_BAK), terms.accept_N, reduction="none"
            )
            total = total + self.settings.confidence * (losses["confidence"] * weights_N).sum()
        means = {f"loss_{name}": weighted_mean(values_N, weights_N) for name, values_N in losses.items()}
        means["loss"] = Mean(total.detach(), weights_N.sum())
        accept_BAK = slots.scatter(terms.accept_N, blocks.valid_BAK.shape)
        means |= acceptance_means(blocks.valid_BAK, accept_BAK, slots.scatter(terms.greedy_N, accept_BAK.shape))
        if output.confidence_BAK is not None:
            means |= confidence_means(blocks, output.confidence_BAK.detach(), accept_BAK)
        return Objective(total / denominator.clamp(min=1e-9), means)

    def _bias(self, output: DraftOutput, slots: Slots) -> MarkovBias | None:
        head = self.drafter.markov_head
        if head is None:
            return None
        assert output.features_BAKr is not None
        features_Nr = slots.of(output.features_BAKr)
        # Of a column's slots any has its features, if these come from the token there alone.
        by_column = head.kind == "vanilla"
        return MarkovBias(features_Nr[slots.first_P] if by_column else features_Nr, head.markov_w2(), by_column)


def acceptance_means(valid_BAK: Tensor, accept_BAK: Tensor, greedy_BAK: Tensor) -> Means:
    """Acceptance by slot, expected tokens per round (tau, probabilistic and greedy), and how the blocks are filled.

    `accept` (probability) and `greedy` (whether both would choose the same token) are 0 where `valid` is false.
    """
    means: Means = {
        f"accept_rate_{slot}": weighted_mean(accept_BAK[..., slot], valid_BAK[..., slot])
        for slot in range(valid_BAK.shape[-1])
    }
    started_BA = valid_BAK[..., 0]
    means["tau_probabilistic"] = weighted_mean(1 + accept_BAK.cumprod(-1).sum(-1), started_BA)
    means["tau_greedy"] = weighted_mean(1 + greedy_BAK.float().cumprod(-1).sum(-1), started_BA)
    means["supervised_per_block"] = weighted_mean(valid_BAK.float().sum(-1), started_BA)
    return means


def confidence_means(blocks: Blocks, confidence_BAK: Tensor, accept_BAK: Tensor) -> Means:
    """Absolute error and bias of the confidence, weighted like the loss; bias of its product over the valid slots."""
    valid_BAK = blocks.valid_BAK
    predicted_BAK = confidence_BAK.sigmoid()
    error_BAK = predicted_BAK - accept_BAK
    masked_BAK = torch.where(valid_BAK, predicted_BAK, 0)
    product_error_BAK = masked_BAK.cumprod(-1) - accept_BAK.cumprod(-1)
    return {
        "confidence_abs_error": weighted_mean(error_BAK.abs(), blocks.weights_BAK),
        "confidence_bias": weighted_mean(error_BAK, blocks.weights_BAK),
        "confidence_cumulative_bias": weighted_mean(product_error_BAK, valid_BAK),
    }
