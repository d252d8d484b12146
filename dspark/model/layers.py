"""The draft layer: a pre-norm transformer block whose keys and values come from the context and from the block.

Shape suffixes: B batch, Q block positions (A blocks of K slots), S context positions, N heads, G key/value heads,
D head width, H hidden width.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dspark.errors import InputError
from dspark.model.activations import activation
from dspark.model.attention import KeyValues, Room, Sight, attend
from dspark.model.config import DraftConfig
from dspark.model.light import gated, rms_normed, rotated, signed_sine


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32 whatever the input's dtype; with `fp32_scale` its weight too."""

    def __init__(self, width: int, eps: float, fp32_scale: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.fp32_scale = eps, fp32_scale

    def forward(self, x: Tensor) -> Tensor:
        return rms_normed(x, self.weight, self.eps, self.fp32_scale)


def norm_of(config: DraftConfig, width: int) -> RMSNorm:
    """A norm as the drafter's form has it."""
    return RMSNorm(width, config.norm_eps, config.form.fp32_scale)


def _normed(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square, in fp32."""
    x32 = x.float()
    return x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)


@dataclass(frozen=True)
class Rotary:
    """Cosine and sine tables [B, positions, D], always fp32."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x_BNQD: Tensor) -> Tensor:
        """Rotates queries or keys [B, heads, positions, D]; the product is fp32, the result has x's dtype."""
        x = x_BNQD.float()
        return rotated(x, *self._of_heads).to(x_BNQD.dtype)

    @cached_property
    def _of_heads(self) -> tuple[Tensor, Tensor]:
        """The tables of all heads [B, 1, positions, D], the sine signed."""
        return self.cos.unsqueeze(1), signed_sine(self.sin.unsqueeze(1))


class RotaryTable:
    """Rotary frequencies of a drafter: plain fp32 tensors, so that no cast of the module can round them."""

    def __init__(self, config: DraftConfig) -> None:
        kind = config.rope["rope_type"]
        self.scaling = 1.0
        if kind == "default":
            exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
            self.frequencies = 1.0 / (config.rope["rope_theta"] ** exponents)
        elif kind in ("linear", "llama3", "yarn", "proportional"):
            self.frequencies, self.scaling = ROPE_INIT_FUNCTIONS[kind](_RopeSource(config))
        else:
            raise InputError(f"rope_type {kind!r} changes with the length of the text and is not supported")
        self._copies: dict[torch.device, Tensor] = {}

    def at(self, positions_BQ: Tensor) -> Rotary:
        """Tables for integer positions [B, Q]."""
        device = positions_BQ.device
        # Copied once: the host waits for such a copy, and a step must not.
        if device not in self._copies:
            self._copies[device] = self.frequencies.to(device)
        angles = positions_BQ[..., None].float() * self._copies[device]
        both = torch.cat((angles, angles), dim=-1)
        return Rotary(both.cos() * self.scaling, both.sin() * self.scaling)


class _RopeSource:
    """The attributes of a transformers configuration that its rope functions read."""

    def __init__(self, config: DraftConfig) -> None:
        self.rope_parameters: dict[str, Any] = config.rope
        self.head_dim = config.head_dim
        self.hidden_size = config.hidden
        self.num_attention_heads = config.heads
        self.max_position_embeddings = config.max_positions

    def standardize_rope_params(self) -> None:
        """transformers calls this first; our parameters come from a configuration that has done it."""


class DraftAttention(nn.Module):
    """Block queries over context keys (prefix only) and the keys of their own block. It reads `width` units, or H."""

    def __init__(self, config: DraftConfig, width: int | None = None) -> None:
        super().__init__()
        width = width or config.hidden
        self.head_dim, self.norm_eps = config.head_dim, config.norm_eps
        self.scale, self.v_norm = config.form.attention_scale, config.form.v_norm
        self.q_proj = nn.Linear(width, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = None if config.shared_kv else nn.Linear(width, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)
        self.q_norm = norm_of(config, config.head_dim) if config.form.qk_norm else nn.Identity()
        self.k_norm = norm_of(config, config.head_dim) if config.form.qk_norm else nn.Identity()

    def key_values(self, x_BSH: Tensor, rotary: Rotary) -> KeyValues:
        """Keys and values of context features or of block states."""
        projected = self._heads(self.k_proj(x_BSH))
        values = projected if self.v_proj is None else self._heads(self.v_proj(x_BSH))
        if self.v_norm:
            values = _normed(values, self.norm_eps).to(values.dtype)
        return KeyValues(rotary(self.k_norm(projected).transpose(1, 2)), values.transpose(1, 2))

    def forward(self, x_BQH: Tensor, rotary: Rotary, context: KeyValues | Room, sight: Sight) -> Tensor:
        return self.attend(x_BQH, rotary, context, self.key_values(x_BQH, rotary), sight)

    def attend(self, x_BQH: Tensor, rotary: Rotary, context: KeyValues | Room, own: KeyValues, sight: Sight) -> Tensor:
        """What queries read from the context as far as they see it, and from their group's own keys."""
        queries = rotary(self.q_norm(self._heads(self.q_proj(x_BQH))).transpose(1, 2))
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return self.o_proj(attend(queries, context, own, sight, scale).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class GatedMlp(nn.Module):
    """down(act(gate x) * up x)."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)
        self.activation = activation(config.activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.activation))


class DraftLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) (design section 4); a sandwich norms the two summands once more."""

    layer_scalar: Tensor

    def __init__(self, config: DraftConfig, width: int | None = None) -> None:
        super().__init__()
        self.sandwich = config.form.sandwich
        self.self_attn = DraftAttention(config, width)
        self.mlp = GatedMlp(config)
        self.input_layernorm = norm_of(config, config.hidden)
        self.post_attention_layernorm = norm_of(config, config.hidden)
        if self.sandwich:
            self.pre_feedforward_layernorm = norm_of(config, config.hidden)
            self.post_feedforward_layernorm = norm_of(config, config.hidden)
            self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x_BQH: Tensor, rotary: Rotary, context: KeyValues | Room, sight: Sight) -> Tensor:
        return self.after_attention(x_BQH, self.self_attn(self.input_layernorm(x_BQH), rotary, context, sight))

    def after_attention(self, x_BQH: Tensor, mixed_BQH: Tensor) -> Tensor:
        """What the layer gives from its residual and what attention has read."""
        if not self.sandwich:
            x = x_BQH + mixed_BQH
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x_BQH + self.post_attention_layernorm(mixed_BQH)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar
