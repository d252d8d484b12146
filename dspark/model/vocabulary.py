"""The target's embedding and output head, frozen: what drafter and target share.

They stay outside the drafter's module tree, so that no optimizer, ZeRO partition or checkpoint ever holds them.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Vocabulary:
    """Frozen embedding [V, H] and head [V, H]; one storage where the target ties them."""

    embedding_VH: Tensor
    head_VH: Tensor

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., H] of token ids [...]."""
        return F.embedding(ids, self.embedding_VH)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of normed states [..., H], in the states' dtype."""
        return F.linear(hidden, self.head_VH)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Vocabulary":
        """A copy on another device or in another dtype; tied weights stay tied."""
        embedding = self.embedding_VH.to(device=device, dtype=dtype)
        tied = self.head_VH.data_ptr() == self.embedding_VH.data_ptr()
        return Vocabulary(embedding, embedding if tied else self.head_VH.to(device=device, dtype=dtype))
