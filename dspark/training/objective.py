"""The DSpark objective over the supervised slots of a batch (paper section 3.3, equations 8 to 12).

Nothing here reduces over ranks, logs or synchronises: sums and weights are returned, the caller divides.
Shape suffixes: B batch, A blocks, K slots, N supervised slots of the batch, V vocabulary, D tokens that may be drafted
(D = V unless the drafter's vocabulary is reduced), H hidden, S context, r rank.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.learning import LossSettings
from dspark.model.drafter import Drafter
from dspark.model.vocabulary import Vocabulary
from dspark.training.batch import Batch
from dspark.training.blocks import Blocks, block_inputs
from dspark.training.means import Means, weighted_mean


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
    context = drafter.context(_seen_taps(batch, blocks), batch.positions_BS[:, : blocks.reach])
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


def _seen_taps(batch: Batch, blocks: Blocks) -> Tensor:
    """Taps [B, R, L*H] up to the batch's last anchor, with zeros from each document's last anchor on.

    No block looks there. What lies behind the last anchor of all is left out, and no layer projects it. What lies
    between documents is still projected, and there a hidden value that is not a number would reach the weights: their
    gradient sums over all columns, and 0 x NaN is NaN.
    """
    starts_BS = batch.starts_BS[:, : blocks.reach]
    anchors_BA = torch.where(blocks.keep_BA, blocks.anchors_BA, 0)
    # At each document's first column, its last anchor; 0 for a document without one.
    last_BS = torch.zeros_like(starts_BS).scatter_reduce(1, blocks.starts_BA, anchors_BA, "amax")
    columns_S = torch.arange(starts_BS.shape[1], device=starts_BS.device)
    return batch.taps_BSLH[:, : blocks.reach].masked_fill((columns_S >= last_BS.gather(1, starts_BS))[..., None], 0)


def draft_logits(drafter: Drafter, vocabulary: Vocabulary, output: DraftOutput, slots: Tensor) -> Tensor:
    """Draft logits [N, D] in fp32 of the slots selected by the mask `slots` [B, A, K]."""
    logits_ND = vocabulary.draft_logits(output.hidden_BAKH[slots]).float()
    if drafter.markov_head is not None:
        assert output.features_BAKr is not None
        logits_ND = logits_ND + drafter.markov_head.bias(output.features_BAKr[slots]).float()
    return logits_ND


def target_logits(vocabulary: Vocabulary, batch: Batch, blocks: Blocks, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The target's logits in fp32 for the tokens that the selected slots predict: row a+k of `final`.

    Many slots share a column, which is projected once: logits [P, V] of the distinct columns, and for each of the N
    slots its row in them.
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

    def __init__(self, drafter: Drafter, settings: LossSettings) -> None:
        super().__init__()
        self.drafter = drafter
        self.settings = settings

    def forward(self, vocabulary: Vocabulary, batch: Batch, blocks: Blocks, denominator: Tensor) -> Objective:
        """Loss = (ce sum + l1 sum + confidence sum, each times its setting) / denominator.

        `denominator` is the sum of slot weights that the caller chose (design section 4: over the whole step). With a
        reduced vocabulary q is 0 outside it: the target's mass there counts in full in the l1 term, and a label there,
        whose cross-entropy is infinite whatever the drafter does, adds nothing to the ce term.
        """
        output = run_drafter(self.drafter, vocabulary, batch, blocks)
        slots = blocks.valid_BAK
        logits_ND = draft_logits(self.drafter, vocabulary, output, slots)
        with torch.no_grad():
            target_PV, row_N = target_logits(vocabulary, batch, blocks, slots)
            target_PD = vocabulary.of_kept(target_PV.softmax(-1))
            missed_N = (1 - target_PD.sum(-1)).clamp(min=0)[row_N] if vocabulary.kept_D is not None else 0.0
        weights_N = blocks.weights_BAK[slots]
        labels_N, kept_N = vocabulary.draft_ids(blocks.labels_BAK[slots])
        ce_N = F.cross_entropy(logits_ND, labels_N, reduction="none") * kept_N
        l1_N = (logits_ND.softmax(-1) - target_PD[row_N]).abs().sum(-1) + missed_N
        accept_N = (1 - l1_N.detach() / 2).clamp(0, 1)
        terms = {"ce": ce_N, "l1": l1_N}
        if output.confidence_BAK is not None:
            terms["confidence"] = F.binary_cross_entropy_with_logits(
                output.confidence_BAK[slots], accept_N, reduction="none"
            )
        loss_N = sum(getattr(self.settings, name) * term for name, term in terms.items())
        assert isinstance(loss_N, Tensor)
        # An empty sum keeps the graph, so a batch without anchors still gives every parameter a (zero) gradient.
        loss = (loss_N * weights_N).sum() / denominator.clamp(min=1e-9)
        means = {f"loss_{name}": weighted_mean(term, weights_N) for name, term in terms.items()}
        with torch.no_grad():
            means["loss"] = weighted_mean(loss_N, weights_N)
            greedy_N = vocabulary.tokens(logits_ND.argmax(-1)) == target_PV.argmax(-1)[row_N]
            means |= acceptance_means(slots, accept_N, greedy_N)
            if output.confidence_BAK is not None:
                means |= confidence_means(blocks, output.confidence_BAK, accept_N)
        return Objective(loss, means)


def acceptance_means(valid_BAK: Tensor, accept_N: Tensor, greedy_N: Tensor) -> Means:
    """Acceptance by slot, expected tokens per round (tau, probabilistic and greedy), and how the blocks are filled."""
    accept_BAK = _scatter(valid_BAK, accept_N)
    greedy_BAK = _scatter(valid_BAK, greedy_N.float())
    means: Means = {
        f"accept_rate_{slot}": weighted_mean(accept_BAK[..., slot], valid_BAK[..., slot])
        for slot in range(valid_BAK.shape[-1])
    }
    started_BA = valid_BAK[..., 0]
    means["tau_probabilistic"] = weighted_mean(1 + accept_BAK.cumprod(-1).sum(-1), started_BA)
    means["tau_greedy"] = weighted_mean(1 + greedy_BAK.cumprod(-1).sum(-1), started_BA)
    means["supervised_per_block"] = weighted_mean(valid_BAK.float().sum(-1), started_BA)
    return means


def confidence_means(blocks: Blocks, confidence_BAK: Tensor, accept_N: Tensor) -> Means:
    """Absolute error and bias of the confidence, weighted like the loss; bias of its product over the valid slots."""
    valid_BAK = blocks.valid_BAK
    predicted_BAK = confidence_BAK.sigmoid()
    accept_BAK = _scatter(valid_BAK, accept_N)
    error_BAK = predicted_BAK - accept_BAK
    masked_BAK = torch.where(valid_BAK, predicted_BAK, 0)
    product_error_BAK = masked_BAK.cumprod(-1) - accept_BAK.cumprod(-1)
    return {
        "confidence_abs_error": weighted_mean(error_BAK.abs(), blocks.weights_BAK),
        "confidence_bias": weighted_mean(error_BAK, blocks.weights_BAK),
        "confidence_cumulative_bias": weighted_mean(product_error_BAK, valid_BAK),
    }


def _scatter(slots_BAK: Tensor, values_N: Tensor) -> Tensor:
    """Values of the selected slots at their places, zero elsewhere."""
    placed = torch.zeros(slots_BAK.shape, device=values_N.device, dtype=values_N.dtype)
    placed[slots_BAK] = values_N
    return placed
