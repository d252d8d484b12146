"""One stretch of memory for products with the vocabulary, that lives as long as the training.

Fresh memory of its size costs more than what is computed in it: the system has to clear each page.
"""

import math

import torch
from torch import Tensor

ALIGNED = 64


class Workspace:
    """Buffers side by side in one arena. They hold until `restart`, after which their memory is given out again."""

    def __init__(self) -> None:
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    @property
    def bytes(self) -> int:
        """Size of the arena."""
        return self._arena.numel()

    def restart(self) -> None:
        """Gives all memory out again."""
        self._used = 0

    def reserve(self, size: int, device: torch.device) -> None:
        """Makes the arena at least `size` bytes large; what was taken of it is void."""
        self.restart()
        if self._arena.device != device or self.bytes < size:
            # The old memory goes before the new comes.
            self._arena = torch.empty(0, dtype=torch.uint8)
            self._arena = torch.empty(size, dtype=torch.uint8, device=device)

    def take(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """A buffer; what it holds means nothing yet."""
        start = -(-self._used // ALIGNED) * ALIGNED
        self._used = start + math.prod(shape) * dtype.itemsize
        assert self._used <= self.bytes, "whoever restarts the arena knows what will be taken"
        return self._arena[start : self._used].view(dtype).view(shape)

    def borrow(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """A buffer that holds until the next one is taken or borrowed."""
        used = self._used
        found = self.take(shape, dtype)
        self._used = used
        return found

    def product(self, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        """left [rows, X] @ right [columns, X] transposed, in `dtype` whatever theirs is."""
        shape = (len(left), len(right))
        found = self.take(shape, dtype)
        if left.dtype == dtype:
            return torch.mm(left, right.t(), out=found)
        return found.copy_(torch.mm(left, right.t(), out=self.borrow(shape, left.dtype)))

    def add_product(self, to: Tensor, left: Tensor, right: Tensor) -> None:
        """Adds left @ right transposed to a buffer, in the buffer's type whatever theirs is."""
        if left.dtype == to.dtype:
            to.addmm_(left, right.t())
        else:
            to += torch.mm(left, right.t(), out=self.borrow((len(left), len(right)), left.dtype))

    def rounded(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """The values in `dtype`, borrowed unless they are so already."""
        return values if values.dtype == dtype else self.borrow((len(values), values.shape[1]), dtype).copy_(values)
