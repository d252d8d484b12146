"""The target's embedding and output head, frozen: what drafter and target share.

They stay outside the drafter's module tree, so that no optimizer, ZeRO partition or checkpoint ever holds them.
A drafter may propose from fewer tokens than the target has: its logits are then over D kept tokens, ascending by id.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dspark.errors import InputError
from dspark.model.few_rows import for_few_rows


@dataclass(frozen=True)
class Vocabulary:
    """Frozen embedding [V, H] and head [V, H]; one storage where the target ties them.

    `kept_D` None: the drafter proposes from all V tokens, and D = V.
    """

    embedding_VH: Tensor
    head_VH: Tensor
    kept_D: Tensor | None = None
    kept_head_DH: Tensor | None = None
    embedding_scale: float = 1.0
    soft_cap: float | None = None  # logits x become cap * tanh(x / cap)

    @property
    def draft_head_DH(self) -> Tensor:
        """Rows of the head for the tokens that the drafter may propose."""
        return self.head_VH if self.kept_head_DH is None else self.kept_head_DH

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., H] of token ids [...]."""
        embedded = F.embedding(ids, self.embedding_VH)
        if self.embedding_scale == 1.0:
            return embedded
        # The target rounds the factor to its compute type before it multiplies.
        return embedded * float(torch.tensor(self.embedding_scale).to(embedded.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's logits [..., V] of normed states [..., H], in the states' dtype."""
        return self._capped(F.linear(hidden, self.head_VH))

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., D] of the drafter's normed states [..., H] over the tokens that it may propose."""
        return self._capped(F.linear(hidden, self.draft_head_DH))

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap

    def tokens(self, draft_ids: Tensor) -> Tensor:
        """Token ids of places 0..D-1 among the kept tokens."""
        return draft_ids if self.kept_D is None else self.kept_D[draft_ids]

    def draft_ids(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Places of token ids among the kept ones, and whether they are kept; the place of another means nothing."""
        if self.kept_D is None:
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        places = torch.searchsorted(self.kept_D, tokens).clamp(max=len(self.kept_D) - 1)
        return places, self.kept_D[places] == tokens

    def of_kept(self, values_V: Tensor) -> Tensor:
        """The columns [..., D] of the kept tokens out of [..., V]."""
        return values_V if self.kept_D is None else values_V[..., self.kept_D]

    def spread(self, logits_D: Tensor) -> Tensor:
        """Draft logits [..., V] with -inf at tokens that are not kept."""
        if self.kept_D is None:
            return logits_D
        spread = logits_D.new_full((*logits_D.shape[:-1], len(self.head_VH)), float("-inf"))
        spread[..., self.kept_D] = logits_D
        return spread

    def narrowed(self, kept_D: Tensor | None) -> "Vocabulary":
        """The same target with a drafter that proposes from `kept_D` alone, or from all tokens."""
        if kept_D is None:
            return replace(self, kept_D=None, kept_head_DH=None)
        kept_D = kept_D.to(self.head_VH.device)
        return replace(self, kept_D=kept_D, kept_head_DH=self.head_VH[kept_D])

    def for_few_rows(self) -> "Vocabulary":
        """The same with heads laid out for products of a few rows, as copies where that is another order."""
        kept = None if self.kept_head_DH is None else for_few_rows(self.kept_head_DH)
        return replace(self, head_VH=for_few_rows(self.head_VH), kept_head_DH=kept)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Vocabulary":
        """A copy on another device or in another dtype; tied weights stay tied."""
        embedding = self.embedding_VH.to(device=device, dtype=dtype)
        tied = self.head_VH.data_ptr() == self.embedding_VH.data_ptr()
        head = embedding if tied else self.head_VH.to(device=device, dtype=dtype)
        return replace(self, embedding_VH=embedding, head_VH=head).narrowed(self.kept_D)


def keep_tokens(counts_V: NDArray[np.int64], size: int, always: Collection[int]) -> NDArray[np.int64]:
    """The `size` most frequent token ids, ascending; those in `always` are among them, equal counts go by lower id.

    Raises:
        InputError: the target has no `size` tokens, or `always` alone are more.
    """
    if size > len(counts_V):
        raise InputError(f"drafter.vocab={size} exceeds the target's {len(counts_V)} tokens: lower it, or leave it out")
    special = sorted(set(always))
    if len(special) > size:
        raise InputError(f"drafter.vocab={size} has no room for the target's {len(special)} special tokens: raise it")
    ranked = counts_V.copy()
    ranked[special] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-ranked, kind="stable")[:size])
