"""The training step as a textbook writes it: a dense mask through SDPA, all logits at once, the formulas as they stand.

What `benchmarks/train_step.py` measures the project's step against, and what a test holds it to.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.learning import LossSettings
from dspark.model.drafter import Drafter
from dspark.model.layers import DraftAttention, Rotary
from dspark.model.vocabulary import Vocabulary
from dspark.training.batch import Batch
from dspark.training.blocks import Blocks, block_inputs, visibility


def textbook_loss(
    drafter: Drafter, vocabulary: Vocabulary, batch: Batch, blocks: Blocks, settings: LossSettings
) -> Tensor:
    """The loss of a batch that is a whole optimizer step (design section 4), for any head and family."""
    hidden_BAKH = _states(drafter, vocabulary, batch, blocks)
    logits_BAKV = vocabulary.draft_logits(hidden_BAKH).float()
    embedded_BAKr = None
    if drafter.markov_head is not None:
        embedded_BAKr = drafter.markov_head.embed(blocks.previous_BAK)
        features = drafter.markov_head.block_features(embedded_BAKr, hidden_BAKH)
        logits_BAKV = logits_BAKV + drafter.markov_head.bias(features).float()
    columns_BN = blocks.columns_BAK.flatten(1).clamp(max=batch.final_BSH.shape[1] - 1)
    final_BNH = batch.final_BSH.gather(1, columns_BN[..., None].expand(-1, -1, batch.final_BSH.shape[2]))
    p_BAKV = vocabulary.logits(final_BNH).float().softmax(-1).view_as(logits_BAKV)
    ce_BAK = F.cross_entropy(logits_BAKV.flatten(0, 2), blocks.labels_BAK.flatten(), reduction="none")
    l1_BAK = (logits_BAKV.softmax(-1) - p_BAKV).abs().sum(-1)
    loss_BAK = settings.ce * ce_BAK.view_as(l1_BAK) + settings.l1 * l1_BAK
    if drafter.confidence_head is not None:
        accept_BAK = (1 - l1_BAK.detach() / 2).clamp(0, 1)
        says_BAK = drafter.confidence_head(hidden_BAKH, embedded_BAKr).float()
        loss_BAK = loss_BAK + settings.confidence * F.binary_cross_entropy_with_logits(
            says_BAK, accept_BAK, reduction="none"
        )
    return (loss_BAK * blocks.weights_BAK).sum() / blocks.weights_BAK.sum()


def _states(drafter: Drafter, vocabulary: Vocabulary, batch: Batch, blocks: Blocks) -> Tensor:
    feature_BSH = drafter.hidden_norm(drafter.fc(batch.taps_BSLH))
    context, own = drafter.rotary.at(batch.positions_BS), drafter.rotary.at(blocks.positions_BAK.flatten(1))
    visible_B1QM = visibility(blocks, feature_BSH.shape[1])
    x_BQH = vocabulary.embed(block_inputs(blocks, drafter.config.mask_token_id))
    for layer in drafter.layers:
        normed_BQH = layer.input_layernorm(x_BQH)
        mixed_BQH = _attention(layer.self_attn, normed_BQH, feature_BSH, own, context, visible_B1QM)
        x_BQH = layer.after_attention(x_BQH, mixed_BQH)
    return drafter.norm(x_BQH).unflatten(1, (-1, blocks.block))


def _attention(
    attention: DraftAttention, x_BQH: Tensor, feature_BSH: Tensor, own: Rotary, context: Rotary, visible_B1QM: Tensor
) -> Tensor:
    parts = attention.key_values(feature_BSH, context), attention.key_values(x_BQH, own)
    keys, values = (torch.cat(both, dim=2) for both in zip(*parts, strict=True))
    queries = attention.q_proj(x_BQH).unflatten(-1, (-1, attention.head_dim))
    queries = own(attention.q_norm(queries).transpose(1, 2))
    mixed = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=visible_B1QM, scale=attention.scale, enable_gqa=True
    )
    return attention.o_proj(mixed.transpose(1, 2).flatten(2))
