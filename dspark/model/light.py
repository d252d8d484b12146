"""Operations of a draft layer that keep little for their backward: inputs alone, the rest is computed once more.

A draft layer runs over all slots of all blocks, so what each operation keeps is what a training step's memory is.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_normed(x: Tensor, weight: Tensor, eps: float, fp32_scale: bool) -> Tensor:
    """x over its root mean square, times `weight`; the norm is fp32 whatever x is, with `fp32_scale` the product too.

    Keeps x and one number per row.
    """
    if not torch.is_grad_enabled():
        normed = F.rms_norm(x.float(), x.shape[-1:], eps=eps)
        return (normed * weight.float()).to(x.dtype) if fp32_scale else weight * normed.to(x.dtype)
    apply: Any = _RmsNormed.apply
    return apply(x, weight, eps, fp32_scale)


def signed_sine(sin: Tensor) -> Tensor:
    """The sine [..., D] of a rotation as `rotated` takes it: the partner of a left half enters with a minus."""
    left, right = sin.chunk(2, dim=-1)
    return torch.cat((-left, right), dim=-1)


def rotated(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """x [..., D] rotated, each number with its partner half a head away."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * signed_sin


def gated(gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """activation(gate) * up. Keeps both inputs."""
    if not torch.is_grad_enabled():
        return activation(gate) * up
    apply: Any = _Gated.apply
    return apply(gate, up, activation)


class _RmsNormed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, fp32_scale: bool) -> Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.fp32_scale = fp32_scale
        normed = x32 * scale
        return (normed * weight.float()).to(x.dtype) if fp32_scale else weight * normed.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x.float() * scale
        # The products of the forward, in the types that they had there.
        factor, shared = (grad.float(), normed) if ctx.fp32_scale else (grad, normed.to(grad.dtype))
        d_weight = (factor * shared).flatten(0, -2).sum(0).to(weight.dtype)
        pulled = (factor * weight.to(factor.dtype)).float()
        d_x = scale * (pulled - normed * (pulled * normed).mean(-1, keepdim=True))
        return d_x.to(x.dtype), d_weight, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return activation(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            leaf = gate.detach().requires_grad_()
            activated = ctx.activation(leaf)
        (d_gate,) = torch.autograd.grad(activated, leaf, grad * up)
        return d_gate, grad * activated.detach(), None
