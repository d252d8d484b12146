"""EAGLE-3 written down a second time, one row and one step after the other in float64: no batch, padding or mask.

Suffixes: S positions, H hidden, V vocabulary, N heads, D head width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.learning import Eagle3Settings
from dspark.model.config import Eagle3Config
from dspark.training.batch import Batch
from tests.dspark.plain import norm, rotate

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class PlainStep:
    """What row `row` of a text predicts at one step, and what the target does."""

    row: int
    step: int
    draft_V: Tensor
    target_V: Tensor


def plain_chain(
    weights: Weights, config: Eagle3Config, ids: Sequence[int], taps: Tensor, final: Tensor, row: int, steps: int
) -> list[PlainStep]:
    """The first `steps` steps of the chain of one row; step j needs token row+1+j."""
    layer = {name.removeprefix("layers.0."): tensor for name, tensor in weights.items()}
    features_SH = taps.double() @ weights["fc.weight"].T
    keys, values = [], []
    for position in range(row + 1):
        key_ND, value_ND = _key(layer, config, _join(layer, config, features_SH[position], ids[position + 1]), position)
        keys.append(key_ND)
        values.append(value_ND)
    found, state_H = [], features_SH[row]
    for step in range(steps):
        joined = _join(layer, config, state_H, ids[row + 1 + step])
        if step:
            key_ND, value_ND = _key(layer, config, joined, row + step)
            keys.append(key_ND)
            values.append(value_ND)
        mixed_H = _attend(layer, config, joined, row + step, torch.stack(keys), torch.stack(values))
        state_H = _after(layer, config, state_H, mixed_H)
        draft_V = norm(state_H, weights["norm.weight"], config) @ weights["lm_head.weight"].T
        target_V = final[row + 1 + step].double() @ weights["lm_head.weight"].detach().T
        found.append(PlainStep(row, step, _capped(config, draft_V), _capped(config, target_V)))
    return found


def _after(layer: Weights, config: Eagle3Config, state_H: Tensor, mixed_H: Tensor) -> Tensor:
    """Both summands of the layer, which Gemma4 norms once more, and scales together."""
    if config.form.name != "gemma4":
        x = state_H + mixed_H
        return x + _mlp(layer, config, norm(x, layer["post_attention_layernorm.weight"], config))
    x = state_H + norm(mixed_H, layer["post_attention_layernorm.weight"], config)
    y = _mlp(layer, config, norm(x, layer["pre_feedforward_layernorm.weight"], config))
    return (x + norm(y, layer["post_feedforward_layernorm.weight"], config)) * layer["layer_scalar"]


def _mlp(layer: Weights, config: Eagle3Config, x: Tensor) -> Tensor:
    gate = x @ layer["mlp.gate_proj.weight"].T
    gelu = torch.nn.functional.gelu(gate, approximate="tanh")
    act = gelu if config.form.name == "gemma4" else gate * gate.sigmoid()
    return (act * (x @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T


def _capped(config: Eagle3Config, logits: Tensor) -> Tensor:
    return logits if config.soft_cap is None else config.soft_cap * (logits / config.soft_cap).tanh()


def carries(mask: Sequence[int], row: int, step: int, alignment: str) -> bool:
    """Whether row t carries loss at step j, by the words of the design."""
    if alignment == "published":
        return row + 1 + step < len(mask) and bool(mask[row + step])
    wanted = range(row + 1, row + 2 + step + 1)
    return all(position < len(mask) and mask[position] for position in wanted)


def plain_loss(
    weights: Weights, config: Eagle3Config, batch: Batch, masks: Sequence[Sequence[int]], settings: Eagle3Settings,
    kept: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The loss of a batch that is a whole optimizer step; `masks` are the rows' loss masks without padding."""
    total, sequences, tokens = torch.zeros((), dtype=torch.double), 0, 0
    for number, mask in enumerate(masks):
        tokens += len(mask)
        text = (batch.input_ids_BS[number].tolist(), batch.taps_BSLH[number], batch.final_BSH[number])
        by_step: list[list[Tensor]] = [[] for _ in range(settings.ttt_length)]
        for row in range(len(mask) - 1):
            steps = min(settings.ttt_length, len(mask) - 1 - row)
            for found in plain_chain(weights, config, *text, row, steps):
                if carries(mask, row, found.step, settings.mask_alignment):
                    by_step[found.step].append(soft_cross_entropy(found, kept))
        sequences += bool(by_step[0])
        for step, terms in enumerate(by_step):
            if terms:
                rows = len(terms) if settings.normaliser == "sequences" else 1
                total = total + settings.step_loss_decay**step * torch.stack(terms).sum() / rows
    return total / (sequences if settings.normaliser == "sequences" else tokens)


def soft_cross_entropy(found: PlainStep, kept: Tensor | None) -> Tensor:
    """Against the target's softmax, restricted to `kept` and renormalised."""
    chosen = slice(None) if kept is None else kept
    p, q = found.target_V.softmax(0)[chosen], found.draft_V[chosen].softmax(0)
    return -(p / p.sum() * q.log()).sum()


def _join(layer: Weights, config: Eagle3Config, feature_H: Tensor, token: int) -> Tensor:
    scaled = layer["embed_tokens.weight"][token] * config.embedding_scale
    embedding = norm(scaled, layer["input_layernorm.weight"], config)
    return torch.cat((embedding, norm(feature_H, layer["hidden_norm.weight"], config)))


def _heads(layer: Weights, config: Eagle3Config, name: str, joined: Tensor) -> Tensor:
    return (layer[f"self_attn.{name}_proj.weight"] @ joined).view(-1, config.head_dim)


def _turned(layer: Weights, config: Eagle3Config, name: str, joined: Tensor, position: int) -> Tensor:
    heads = _heads(layer, config, name, joined)
    if config.form.name != "llama":
        heads = norm(heads, layer[f"self_attn.{name}_norm.weight"], config)
    return rotate(heads[None], position, config.rope["rope_theta"])[0]


def _key(layer: Weights, config: Eagle3Config, joined: Tensor, position: int) -> tuple[Tensor, Tensor]:
    values = _heads(layer, config, "k" if config.shared_kv else "v", joined)
    if config.form.name == "gemma4":
        values = norm(values, torch.ones(config.head_dim), config)
    return _turned(layer, config, "k", joined, position), values


def _attend(
    layer: Weights, config: Eagle3Config, joined: Tensor, position: int, keys: Tensor, values: Tensor
) -> Tensor:
    query_ND, mixed = _turned(layer, config, "q", joined, position), []
    for head in range(config.heads):
        group = head // (config.heads // config.kv_heads)
        scores = keys[:, group] @ query_ND[head] * (1.0 if config.form.name == "gemma4" else config.head_dim**-0.5)
        mixed.append(scores.softmax(0) @ values[:, group])
    return layer["self_attn.o_proj.weight"] @ torch.cat(mixed)
