"""DSpark written down a second time, one block after the other in float64: no batch, no padding, no attention mask.

The tests compare the project's code with it. Suffixes: S context, K slots, V vocabulary, H hidden, L taps.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.model.config import DraftConfig, DSparkConfig
from dspark.model.kinds import AnyDrafter
from dspark.model.vocabulary import Vocabulary
from dspark.training.batch import Batch

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class PlainBlock:
    """What one block predicts in its supervised slots, the first n of its K."""

    labels: list[int]
    draft_nV: Tensor
    target_nV: Tensor
    confidence_n: Tensor | None
    hidden_KH: Tensor


def weights_of(drafter: AnyDrafter, vocabulary: Vocabulary) -> dict[str, Tensor]:
    """All weights under the published names, in float64, ready for gradients."""
    tensors = {
        **drafter.state_dict(),
        "embed_tokens.weight": vocabulary.embedding_VH,
        "lm_head.weight": vocabulary.head_VH,
    }
    return {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}


def plain_blocks(
    weights: Weights, config: DSparkConfig, batch: Batch, anchors: Sequence[Iterable[int]]
) -> list[PlainBlock]:
    """Every block of a batch, row by row."""
    return [
        _block(weights, config, ids, mask, taps.double(), final.double(), int(anchor))
        for ids, mask, taps, final, row in zip(
            batch.input_ids_BS.tolist(),
            batch.loss_mask_BS.tolist(),
            batch.taps_BSLH,
            batch.final_BSH,
            anchors,
            strict=True,
        )
        for anchor in row
    ]


def plain_losses(blocks: Sequence[PlainBlock], gamma: float | None) -> dict[str, Tensor]:
    """ce, l1 and confidence, each a weighted mean over all supervised slots."""
    sums = {"ce": torch.zeros((), dtype=torch.double), "l1": torch.zeros((), dtype=torch.double)}
    sums["confidence"] = torch.zeros((), dtype=torch.double)
    weight = 0.0
    for block in blocks:
        for slot, label in enumerate(block.labels):
            w = 1.0 if gamma is None else math.exp(-slot / gamma)
            q, p = block.draft_nV[slot].softmax(0), block.target_nV[slot].softmax(0)
            distance = (p - q).abs().sum()
            sums["ce"] = sums["ce"] - w * q[label].log()
            sums["l1"] = sums["l1"] + w * distance
            if block.confidence_n is not None:
                accept = 1 - distance.item() / 2
                says = block.confidence_n[slot].sigmoid()
                sums["confidence"] = sums["confidence"] - w * (accept * says.log() + (1 - accept) * (1 - says).log())
            weight += w
    return {name: total / weight if weight else total for name, total in sums.items()}


def _block(
    w: Weights, config: DSparkConfig, ids: list[int], mask: list[bool], taps: Tensor, final: Tensor, anchor: int
) -> PlainBlock:
    count = 0
    while count < config.block and anchor + count + 1 < len(ids) and mask[anchor + count + 1]:
        count += 1
    context_SH = norm(taps[:anchor] @ w["fc.weight"].T, w["hidden_norm.weight"], config)
    x = w["embed_tokens.weight"][[ids[anchor]] + [config.mask_token_id] * (config.block - 1)]
    for layer in range(config.layers):
        part = {name.removeprefix(f"layers.{layer}."): tensor for name, tensor in w.items()}
        x = x + _attention(part, config, norm(x, part["input_layernorm.weight"], config), context_SH)
        y = norm(x, part["post_attention_layernorm.weight"], config)
        gate = y @ part["mlp.gate_proj.weight"].T
        up = y @ part["mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ part["mlp.down_proj.weight"].T
    hidden_KH = norm(x, w["norm.weight"], config)
    draft = hidden_KH[:count] @ w["lm_head.weight"].T
    confidence_input = hidden_KH[:count]
    if config.markov_rank:
        e = w["markov_head.markov_w1.weight"][ids[anchor : anchor + count]]
        draft = draft + _markov(w, config, e, hidden_KH[:count]) @ w["markov_head.markov_w2.weight"].T
        if config.confidence_with_markov:
            confidence_input = torch.cat((confidence_input, e), dim=1)
    confidence = None
    if config.confidence:
        confidence = confidence_input @ w["confidence_head.proj.weight"][0] + w["confidence_head.proj.bias"]
    target = final[anchor : anchor + count] @ w["lm_head.weight"].detach().T
    return PlainBlock(ids[anchor + 1 : anchor + 1 + count], draft, target, confidence, hidden_KH)


def norm(x: Tensor, weight: Tensor, config: DraftConfig) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return weight * x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()


def rotate(x: Tensor, first: int, theta: float) -> Tensor:
    """Heads [positions, N, D] turned pair by pair: entry i with entry i + D/2."""
    half = x.shape[-1] // 2
    angle = torch.arange(first, first + len(x))[:, None, None] * theta ** (-torch.arange(half).double() / half)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), dim=-1)


def _attention(w: Weights, config: DSparkConfig, x: Tensor, context: Tensor) -> Tensor:
    theta, anchor = config.rope["rope_theta"], len(context)

    def heads(name: str, states: Tensor) -> Tensor:
        return (states @ w[f"self_attn.{name}_proj.weight"].T).view(len(states), -1, config.head_dim)

    both = torch.cat((context, x))
    queries = rotate(norm(heads("q", x), w["self_attn.q_norm.weight"], config), anchor, theta)
    keys = rotate(norm(heads("k", both), w["self_attn.k_norm.weight"], config), 0, theta)
    values = heads("v", both)
    mixed = []
    for head in range(config.heads):
        group = head // (config.heads // config.kv_heads)
        scores = queries[:, head] @ keys[:, group].T / math.sqrt(config.head_dim)
        mixed.append(scores.softmax(-1) @ values[:, group])
    return torch.cat(mixed, dim=-1) @ w["self_attn.o_proj.weight"].T


def _markov(w: Weights, config: DSparkConfig, e: Tensor, h: Tensor) -> Tensor:
    if config.markov_head == "vanilla":
        return e
    if config.markov_head == "gated":
        gate = torch.cat((h, e), dim=1) @ w["markov_head.gate_proj.weight"].T + w["markov_head.gate_proj.bias"]
        return gate.sigmoid() * e
    state, features = torch.zeros(config.markov_rank, dtype=torch.double), []
    for e_r, h_H in zip(e, h, strict=True):
        joint = w["markov_head.joint_proj.weight"] @ torch.cat((state, e_r, h_H)) + w["markov_head.joint_proj.bias"]
        g, c, o = joint.chunk(3)
        state = g.sigmoid() * state + (1 - g.sigmoid()) * c.tanh()
        features.append(o.tanh())
    return torch.stack(features) if features else e
