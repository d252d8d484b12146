"""Operations that keep little: the same values and gradients as their plain formulas."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.model.light import gated, rms_normed


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def plain_norm(x: Tensor, weight: Tensor, eps: float, fp32_scale: bool) -> Tensor:
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype) if fp32_scale else weight * normed.to(x.dtype)


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [value.clone().requires_grad_() for value in inputs]
    out = function(*leaves)
    direction = torch.linspace(-1, 2, out.numel()).view_as(out).to(out.dtype)
    return out, *torch.autograd.grad(out, leaves, direction)


@pytest.mark.parametrize("fp32_scale", [False, True])
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 4, 8)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_the_norm_and_its_gradients_are_those_of_the_formula(
    fp32_scale: bool, shape: tuple[int, ...], dtype: torch.dtype, bound: float
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.randn(8).to(dtype)
    found = with_gradients(lambda x, weight: rms_normed(x, weight, 1e-2, fp32_scale), x, weight)
    plain = with_gradients(lambda x, weight: plain_norm(x, weight, 1e-2, fp32_scale), x, weight)
    assert torch.equal(found[0], plain[0])
    for value, wanted in zip(found[1:], plain[1:], strict=True):
        assert value.dtype == wanted.dtype == dtype
        assert (value - wanted).float().norm() <= bound * wanted.float().norm()


@pytest.mark.parametrize("activation", [F.silu, tanh_gelu])
def test_the_gated_product_and_its_gradients_are_those_of_the_formula(activation: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    found = with_gradients(lambda gate, up: gated(gate, up, activation), gate, up)
    plain = with_gradients(lambda gate, up: activation(gate) * up, gate, up)
    torch.testing.assert_close(found, plain)


def test_nothing_but_inputs_and_a_number_per_row_is_kept() -> None:
    x, weight = torch.randn(50, 64, requires_grad=True), torch.ones(64, requires_grad=True)
    up = torch.randn(50, 64, requires_grad=True)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rms_normed(x, weight, 1e-6, False)
        gated(x, up, F.silu)
    inputs = {tensor.data_ptr() for tensor in (x, weight, up)}
    assert sum(tensor.numel() for tensor in kept if tensor.data_ptr() not in inputs) == 50
