"""Tensors on their way to a device: copied beside the step, waited for by the step's stream and never by the host."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def with_tensors(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """A copy of `value` with every tensor changed, through dataclasses, named tuples and dicts; the rest stays."""
    found: Any = value
    if isinstance(found, Tensor):
        found = change(found)
    elif is_dataclass(found) and not isinstance(found, type):
        found = replace(found, **{f.name: with_tensors(getattr(found, f.name), change) for f in fields(found)})
    elif isinstance(found, dict):
        found = {key: with_tensors(part, change) for key, part in found.items()}
    elif isinstance(found, tuple) and hasattr(found, "_fields"):
        found = type(found)(*(with_tensors(part, change) for part in found))
    return found


@dataclass(frozen=True)
class Arrival(Generic[T]):
    """Tensors on a device, whose copy may still be under way."""

    _value: T
    _tensors: list[Tensor]  # all of the value's
    _device: torch.device
    _copied: torch.cuda.Event | None  # None: nothing had to be copied

    def get(self) -> T:
        """The tensors for the current stream, which waits for the copy; the host goes on."""
        if self._copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._copied)
            # They were allocated for the copying stream: their memory is free when this one has passed too.
            for tensor in self._tensors:
                tensor.record_stream(stream)
        return self._value


class Transfer:
    """Copies to a device: from pinned memory on a stream of their own if it is a GPU, not at all if it is the CPU.

    Made by the thread that will use the tensors; `begin` may be called from any other.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, value: T) -> Arrival[T]:
        """Begins to copy all tensors of `value`, which nobody may change from now on. It may be dropped at once: torch
        keeps pinned memory until the copies out of it are done.
        """
        stream = self.stream
        if stream is None:
            return Arrival(value, [], self.device, None)
        tensors: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            tensors.append(tensor.pin_memory().to(stream.device, non_blocking=True))
            return tensors[-1]

        with torch.cuda.stream(stream):
            return Arrival(with_tensors(value, copy), tensors, stream.device, stream.record_event())
