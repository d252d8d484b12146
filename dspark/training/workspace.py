"""Buffers for products with the vocabulary that live as long as the training.

Fresh memory of their size costs more than what is computed in it: the system has to clear each page.
"""

import torch
from torch import Tensor


class Workspace:
    """Named buffers; a name's contents hold until the name is taken again."""

    def __init__(self) -> None:
        self._flat: dict[str, Tensor] = {}

    @property
    def bytes(self) -> int:
        """What all buffers hold together."""
        return sum(flat.nbytes for flat in self._flat.values())

    def take(self, name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of that name in the given shape; what it holds means nothing yet."""
        size, found = shape[0] * shape[1], self._flat.get(name)
        if found is None or found.numel() < size or found.dtype != dtype or found.device != device:
            # The old buffer goes before the new one comes.
            self._flat.pop(name, None)
            del found
            found = self._flat[name] = torch.empty(size, dtype=dtype, device=device)
        return found[:size].view(shape)

    def product(self, name: str, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        """left [rows, X] @ right [columns, X] transposed, in `dtype` whatever theirs is."""
        shape = (len(left), len(right))
        found = self.take(name, shape, dtype, left.device)
        if left.dtype == dtype:
            return torch.mm(left, right.t(), out=found)
        return found.copy_(torch.mm(left, right.t(), out=self.take("rounded", shape, left.dtype, left.device)))

    def rounded(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """The values in `dtype`, in a buffer unless they are so already."""
        if values.dtype == dtype:
            return values
        return self.take("rounded", (len(values), values.shape[1]), dtype, values.device).copy_(values)
