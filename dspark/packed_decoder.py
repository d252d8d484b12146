"""The decoder of a Llama-shaped target over packed tokens, in few operations: what a pass of `dspark.packed` runs.

    x --norm--> [q k v], one product --head norms, rotation--> store --attention--> out + x
      --norm--> [gate up], one product --> activation(gate) * up --> down + x

A round computes a handful of tokens, and around its products transformers' layers spend a good part of a pass: they
serve every use, in many small steps. Here is the one use, with the model's own weights, rotary embedding and rounding.
q, k and v, and gate and up, are read in one product each: their weights are laid one below the other, and the model's
parameters become views of that, so that nothing is held twice and transformers' own forward goes on as before.
Shape suffixes: N tokens, H hidden width, n query heads, G key/value heads, D head width.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache

from dspark.model.few_rows import for_few_rows
from dspark.model.light import rms_normed, rotated, signed_sine
from dspark.packed import Packed, attend


class Product(NamedTuple):
    """Weight [out, in] of a linear layer, or of several side by side, and its bias [out]."""

    weight: Tensor
    bias: Tensor | None


class Rotation(NamedTuple):
    """Cosine and signed sine [N, 1, D] of a pass."""

    cos: Tensor
    signed_sin: Tensor


class Norm(NamedTuple):
    """Scale [H], or [heads, D] for a norm within heads, and epsilon of a root-mean-square norm."""

    scale: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_normed(x, self.scale, self.eps, fp32_scale=False)


class PackedDecoder:
    """The decoder layers and the last norm of a transformers model, whose q, k, v and gate, up it joins."""

    def __init__(self, decoder: Any) -> None:
        self.layers = [PackedLayer(layer) for layer in decoder.layers]
        self.rotary, self.norm = decoder.rotary_emb, norm_of(decoder.norm)

    def __call__(
        self, embedded_NH: Tensor, taps: Collection[int], packed: Packed, visible: Sequence[Tensor], cache: Cache
    ) -> tuple[dict[int, Tensor], Tensor]:
        """States [N, H] at `taps`, and the normed last ones; `visible` is the mask of each layer."""
        cos_1ND, sin_1ND = self.rotary(embedded_NH, packed.positions_N[None])
        rotation = Rotation(cos_1ND[0, :, None], signed_sine(sin_1ND[0, :, None]))
        x_NH = embedded_NH
        held = {-1: x_NH} if -1 in taps else {}
        for number, (layer, seen) in enumerate(zip(self.layers, visible, strict=True)):
            x_NH = layer(x_NH, rotation, packed, seen, cache)
            if number in taps:
                held[number] = x_NH
        return held, self.norm(x_NH)


class PackedLayer:
    """One decoder layer."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.number, self.head_dim, self.scale = attention.layer_idx, attention.head_dim, attention.scaling
        self.qkv = joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up = joined([mlp.gate_proj, mlp.up_proj])
        self.out, self.down = product_of(attention.o_proj), product_of(mlp.down_proj)
        self.groups = len(attention.k_proj.weight) // self.head_dim
        self.rotated = len(self.qkv.weight) // self.head_dim - self.groups  # heads of queries and keys
        self.before_attention, self.before_mlp = map(norm_of, (layer.input_layernorm, layer.post_attention_layernorm))
        self.head_norm = self._head_norm(attention) if hasattr(attention, "q_norm") else None
        self.activation = mlp.act_fn

    def __call__(self, x_NH: Tensor, rotation: Rotation, packed: Packed, visible: Tensor, cache: Cache) -> Tensor:
        heads = F.linear(self.before_attention(x_NH), *self.qkv).unflatten(-1, (-1, self.head_dim))
        turning, values_NGD = heads[:, : self.rotated], heads[:, self.rotated :]
        if self.head_norm is not None:
            turning = self.head_norm(turning)
        turned = rotated(turning, *rotation)
        queries_NnD, keys_NGD = turned[:, : -self.groups], turned[:, -self.groups :]
        keys, values = cache.update(keys_NGD.transpose(0, 1)[None], values_NGD.transpose(0, 1)[None], self.number)
        mixed_NnD = attend(queries_NnD, keys, values, visible, self.scale, packed)
        x_NH = x_NH + F.linear(mixed_NnD.flatten(1), *self.out)
        gate, up = F.linear(self.before_mlp(x_NH), *self.gate_up).chunk(2, dim=-1)
        return x_NH + F.linear(self.activation(gate) * up, *self.down)

    def _head_norm(self, attention: Any) -> Norm:
        """The norms of queries and keys as one, with a scale for each head."""
        queries, keys = norm_of(attention.q_norm), norm_of(attention.k_norm)
        scales = queries.scale.expand(self.rotated - self.groups, -1), keys.scale.expand(self.groups, -1)
        return Norm(torch.cat(scales), queries.eps)


def norm_of(module: Any) -> Norm:
    return Norm(module.weight.detach(), module.variance_epsilon)


def product_of(linear: nn.Linear) -> Product:
    linear.weight.data = for_few_rows(linear.weight.data)
    return Product(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())


def joined(linears: Sequence[nn.Linear]) -> Product:
    """Layers of one input as one; their own weights become views of it."""
    weight = for_few_rows(torch.cat([linear.weight.detach() for linear in linears]))
    for linear, rows in zip(linears, weight.split([len(linear.weight) for linear in linears]), strict=True):
        linear.weight.data = rows
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears)), "some of these layers have a bias and some have none"
    return Product(weight, torch.cat(biases) if biases else None)


def plain(decoder: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether all layers are as they were loaded: linear layers of one type on one device, with nothing around them."""
    modules = [module for layer in decoder.layers for module in layer.modules()]
    return (
        all(type(linear) is nn.Linear for layer in decoder.layers for linear in _linears(layer))
        and not any(hasattr(module, "_hf_hook") for module in modules)  # accelerate fetches weights by such hooks
        and all(weight.device == device and weight.dtype == dtype for weight in decoder.parameters())
    )


def _linears(layer: Any) -> list[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    return [
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    ]
