"""Activation functions by their name in a config.json.

transformers has them all, in a module that imports seconds of others; those of the families need none of it.
"""

from collections.abc import Callable

from torch import Tensor, nn

_OWN: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_pytorch_tanh": lambda: nn.GELU(approximate="tanh"),
}


def is_activation(name: str) -> bool:
    """Whether there is one of that name."""
    if name in _OWN:
        return True
    from transformers.activations import ACT2FN

    return name in ACT2FN


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function of that name."""
    if name in _OWN:
        return _OWN[name]()
    from transformers.activations import ACT2FN

    return ACT2FN[name]
