"""One pass of a target over rows with different numbers of tokens, packed one behind the other without padding.

    ids [1, N] --embedding, projections, MLP: N tokens--> queries [1, N] --by row--> [R, Q] over keys [R, L] --> [1, N]

All weights are read once for N tokens, the sum of what the rows verify, not R times their longest. Only the queries of
attention are padded, by repeats of a row's last one, since each row looks at keys of its own: at the few positions of a
round their work is a small part of a pass, and padded keys would cost no less. transformers finds the attention under
NAME. Shape suffixes: R rows, Q tokens of the longest, N tokens of all, L positions in use, D head width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dspark.model.attention import grouped

NAME = "dspark_packed"


class Packed:
    """The tokens of one pass: row r computes `counts[r]` >= 1 tokens at positions `starts[r]` and behind."""

    def __init__(self, starts: Sequence[int], counts: Sequence[int], device: torch.device) -> None:
        self.rows, self.width = len(counts), max(counts)
        self.even = min(counts) == self.width
        self.length = max(start + count for start, count in zip(starts, counts, strict=True))
        numbers = [row for row, count in enumerate(counts) for _ in range(count)]
        positions = [start + slot for start, count in zip(starts, counts, strict=True) for slot in range(count)]
        self.firsts = [sum(counts[:row]) for row in range(self.rows)]  # place of each row's first token
        # Where the q-th token of a row stands among all; a row that has fewer repeats its last.
        places = [
            [first + min(slot, count - 1) for slot in range(self.width)]
            for first, count in zip(self.firsts, counts, strict=True)
        ]
        slots = [slot for count in counts for slot in range(count)]
        self.rows_N, self.positions_N = torch.tensor([numbers, positions], device=device).unbind()
        self.places_RQ = torch.tensor(places, device=device)
        self.positions_RQ = self.positions_N[self.places_RQ]
        self._back_N = self.rows_N * self.width + torch.tensor(slots, device=device)
        self._folded: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}

    def by_row(self, x_N: Tensor) -> Tensor:
        """Values of tokens [N, ...] row by row, [R, Q, ...]; a view where the rows have equally many."""
        return x_N.unflatten(0, (self.rows, self.width)) if self.even else x_N[self.places_RQ]

    def together(self, x_RQ: Tensor) -> Tensor:
        """The reverse of `by_row`."""
        flat = x_RQ.flatten(0, 1)
        return flat if self.even else flat[self._back_N]

    def visible(self) -> Tensor:
        """Mask bool [R, 1, Q, L]: each query sees its row up to its own position, so nothing that is stale."""
        columns_L = torch.arange(self.length, device=self.positions_RQ.device)
        return (columns_L <= self.positions_RQ[..., None]).unsqueeze(1)

    def bias(self, visible_R1QL: Tensor, shared: int, like: Tensor) -> Tensor | None:
        """The mask as it is added to the scores of `shared` query heads, [R, 1, shared * Q, L]; made once per pass."""
        key = (id(visible_R1QL), shared)
        if key not in self._folded:
            # A single token sees all of its row but for a window: the kernel is faster without a mask.
            idle = self.rows == self.width == 1 and bool(visible_R1QL.all())
            bias = None
            if not idle:
                hidden = torch.zeros_like(visible_R1QL, dtype=like.dtype).masked_fill_(~visible_R1QL, float("-inf"))
                bias = hidden.repeat(1, 1, shared, 1)
            self._folded[key] = (visible_R1QL, bias)
        return self._folded[key][1]


def attend(
    queries_NnD: Tensor, keys_RGLD: Tensor, values_RGLD: Tensor, visible_R1QL: Tensor, scale: float, packed: Packed
) -> Tensor:
    """What the queries of all tokens read, each from its own row, [N, n, D]."""
    queries_RnQD = packed.by_row(queries_NnD).transpose(1, 2)
    bias = packed.bias(visible_R1QL, queries_RnQD.shape[1] // keys_RGLD.shape[1], queries_RnQD)
    mixed_RQnD = grouped(queries_RnQD, keys_RGLD, values_RGLD, bias, scale).transpose(1, 2)
    return packed.together(mixed_RQnD)


def _attend_as_transformers(
    module: nn.Module,
    queries_1nND: Tensor,
    keys_RGLD: Tensor,
    values_RGLD: Tensor,
    visible_R1QL: Tensor,
    scaling: float,
    packed: Packed,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention in the form of transformers; `packed` is what the caller of the decoder gave it."""
    return attend(queries_1nND[0].transpose(0, 1), keys_RGLD, values_RGLD, visible_R1QL, scaling, packed)[None], None


def register_packed() -> None:
    """Tells transformers of this attention; once or often."""
    # Its models are seconds of a processor, and most who import this module run none.
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend_as_transformers)
