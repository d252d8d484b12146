"""Attention of a drafter: groups of queries, each over a range of the context and over keys of its own.

A DSpark block, an EAGLE-3 row and a request that is decoded are such groups. Who sees what is a range of columns for
each group (`Sight`), never a mask of all queries and keys: what a mask would hide is not computed.

    training on a CPU             tiles of groups and columns (`dspark.model.tiles`)
    training on a CUDA device     flex attention, compiled, over a block mask that is made once per batch
    decoding, one group per row   one call over all columns under a mask: there is little to skip; own keys are written
                                  into a store's `Room` behind what the group sees, so nothing is joined by a copy

Shape suffixes: B batch, A groups, N heads, G key/value heads, Q queries (A groups of K slots), S context columns, E own
keys of each group, M all keys (S, then A groups of E), D head width.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dspark.model.tiles import Tile, TiledAttention, tiles_of

T = TypeVar("T")
# Queries and keys come in whole blocks of the block mask.
_BLOCK = 128
# Lengths are padded to powers of two, apart for queries, context and own keys, so a run meets fewer shapes than this.
_SHAPES = 128


class KeyValues(NamedTuple):
    """Rotated keys and values [B, G, positions, D] of one draft layer."""

    keys: Tensor
    values: Tensor


class Room(NamedTuple):
    """A context with room behind what each group sees: own keys are written there, and stay until they are overwritten.

    One group per row. `write` puts keys and values [B, G, E, D] at columns limit .. limit+E-1 of their rows.
    """

    held: KeyValues  # views that show what `write` has written
    write: Callable[[KeyValues], None]


@dataclass(frozen=True)
class Sight:
    """The context columns start .. limit-1 of its row that each group sees; none where limit <= start.

    A group also sees its own keys, which come with the call. What the ways of computing make of the ranges is kept, so
    a sight is made once per batch and serves all layers.
    """

    starts_BA: Tensor  # int64
    limits_BA: Tensor  # int64
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def tiles(self, rows: int) -> tuple[Tile, ...]:
        """Tiles for groups of `rows` query rows. Reads the ranges on the host, so it waits for a device."""
        pairs = torch.stack((self.starts_BA, self.limits_BA), dim=-1)
        return self._once(("tiles", rows), lambda: tiles_of(pairs.tolist(), rows, self.starts_BA.device))

    def mask(self, slots: int, context: int, own: int) -> Tensor:
        """The ranges as a dense mask [B, 1, Q, M]; Q = 1 if there is one group, whose slots all see the same."""
        groups = self.starts_BA.shape[1]
        slots = 1 if groups == 1 else slots

        def make() -> Tensor:
            columns_S = torch.arange(context, device=self.starts_BA.device)
            below_BAS = (self.starts_BA[..., None] <= columns_S) & (columns_S < self.limits_BA[..., None])
            same_AM = torch.eye(groups, dtype=torch.bool, device=columns_S.device).repeat_interleave(own, dim=1)
            seen_BAM = torch.cat((below_BAS, same_AM.expand(len(below_BAS), -1, -1)), dim=-1)
            return seen_BAM.repeat_interleave(slots, dim=1).unsqueeze(1)

        return self._once(("mask", slots, context, own), make)

    def through(self, own: int, columns: int) -> Tensor:
        """Mask [B, 1, 1, columns] of what one group per row sees where its `own` keys stand behind its range."""

        def make() -> Tensor:
            columns_S = torch.arange(columns, device=self.starts_BA.device)
            seen_BAS = (self.starts_BA[..., None] <= columns_S) & (columns_S < self.limits_BA[..., None] + own)
            return seen_BAS.unsqueeze(1)

        return self._once(("through", own, columns), make)

    def block_mask(self, slots: int, context: int, own: int) -> BlockMask:
        """The mask in the form of flex attention, over `context` columns and own keys, both padded."""
        return self._once(("block_mask", slots, context, own), lambda: _block_mask(self, slots, context, own))

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made


def nothing(like: KeyValues) -> KeyValues:
    """No positions at all."""
    return KeyValues(like.keys[:, :, :0], like.values[:, :, :0])


def attend(queries_BNQD: Tensor, context: KeyValues | Room, own: KeyValues, sight: Sight, scale: float) -> Tensor:
    """What queries read, [B, Q, N, D]: of the context what their group's range holds, and their group's own keys.

    Queries, and own keys and values [B, G, A*E, D], stand group by group. E may be 0; a group that sees nothing then
    reads zeros. Statistics of the softmax and sums are fp32 whatever the type of the inputs. Hidden columns must hold
    numbers: tiles never read a column that no group of its document sees, but the other ways multiply it by 0.
    """
    if isinstance(context, Room):
        context.write(own)
        mask = sight.through(own.keys.shape[2], context.held.keys.shape[2])
        return grouped(queries_BNQD, *context.held, mask, scale).transpose(1, 2)
    if sight.starts_BA.shape[1] == 1 and not torch.is_grad_enabled():
        return dense(queries_BNQD, context, own, sight, scale)
    if not queries_BNQD.is_cuda:
        return tiled(queries_BNQD, context, own, sight, scale)
    return fused(queries_BNQD, context, own, sight, scale, _compiled())


def tiled(queries_BNQD: Tensor, context: KeyValues, own: KeyValues, sight: Sight, scale: float) -> Tensor:
    """`attend` by tiles."""
    groups = sight.starts_BA.shape[1]
    own_keys, own_values = (part.unflatten(2, (groups, part.shape[2] // groups)) for part in own)
    tiles = sight.tiles(queries_BNQD.shape[1] * queries_BNQD.shape[2] // groups)
    mixed: Tensor = TiledAttention.apply(queries_BNQD, *context, own_keys, own_values, tiles, scale)  # type: ignore[no-untyped-call]
    return mixed


def dense(queries_BNQD: Tensor, context: KeyValues, own: KeyValues, sight: Sight, scale: float) -> Tensor:
    """`attend` by one call over all keys under a mask."""
    groups = sight.starts_BA.shape[1]
    mask = sight.mask(queries_BNQD.shape[2] // groups, context.keys.shape[2], own.keys.shape[2] // groups)
    keys, values = (torch.cat(parts, dim=2) for parts in zip(context, own, strict=True))
    mixed = F.scaled_dot_product_attention(queries_BNQD, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
    return mixed.transpose(1, 2)


def grouped(queries_BNQD: Tensor, keys_BGMD: Tensor, values_BGMD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """What queries read, [B, N, Q, D], without a copy of the keys for each of the N / G query heads that share them.

    Those heads become further queries of one. The mask is [B, 1, 1, M] for all queries, or [B, 1, N / G * Q, M].
    """
    heads, length = queries_BNQD.shape[1:3]
    groups = keys_BGMD.shape[1]
    folded = queries_BNQD.reshape(len(queries_BNQD), groups, heads // groups * length, -1)
    mixed = F.scaled_dot_product_attention(folded, keys_BGMD, values_BGMD, attn_mask=mask, scale=scale)
    return mixed.reshape(len(mixed), heads, length, -1)


def fused(
    queries_BNQD: Tensor, context: KeyValues, own: KeyValues, sight: Sight, scale: float, kernel: Callable[..., Any]
) -> Tensor:
    """`attend` by flex attention; `kernel` is that function, compiled or not."""
    groups, length = sight.starts_BA.shape[1], queries_BNQD.shape[2]
    columns = padded(context.keys.shape[2])
    mask = sight.block_mask(length // groups, columns, own.keys.shape[2] // groups)
    keys, values = (
        torch.cat((_to_length(one, columns), _to_length(other, padded(other.shape[2]))), dim=2)
        for one, other in zip(context, own, strict=True)
    )
    queries = _to_length(queries_BNQD, padded(length))
    mixed: Tensor = kernel(queries, keys, values, block_mask=mask, scale=scale, enable_gqa=True)
    return mixed[:, :, :length].transpose(1, 2)


def padded(length: int) -> int:
    """The length as a power of two, at least a block, or 0: few shapes are compiled, and idle blocks are skipped."""
    return max(_BLOCK, 1 << (length - 1).bit_length()) if length else 0


def _to_length(x_BNQD: Tensor, length: int) -> Tensor:
    """With zeros behind: a kernel multiplies hidden values by 0, and 0 x NaN is NaN."""
    return F.pad(x_BNQD, (0, 0, 0, length - x_BNQD.shape[2]))


def _block_mask(sight: Sight, slots: int, context: int, own: int) -> BlockMask:
    batch, groups = sight.starts_BA.shape
    queries, keys = padded(groups * slots), context + padded(groups * own)
    # Tensors alone: a number in the function would be a constant of the compiled kernel. Padded queries are a group
    # behind the last, which sees nothing; context columns and padded keys are nobody's own.
    starts_BA, limits_BA = (F.pad(bounds, (0, 1)) for bounds in (sight.starts_BA, sight.limits_BA))
    numbers_A = torch.arange(groups, device=starts_BA.device)
    group_Q = F.pad(numbers_A.repeat_interleave(slots), (0, queries - groups * slots), value=groups)
    own_M = F.pad(numbers_A.repeat_interleave(own), (context, keys - context - groups * own), value=-1)

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        group = group_Q[query]
        return ((starts_BA[row, group] <= key) & (key < limits_BA[row, group])) | (own_M[key] == group)

    return create_block_mask(sees, batch, None, queries, keys, device=str(starts_BA.device), BLOCK_SIZE=_BLOCK)


@cache
def _compiled() -> Callable[..., Any]:
    # Without compilation flex attention holds all scores, and so it would for shapes beyond the compiler's limit.
    torch._dynamo.config.recompile_limit = max(_SHAPES, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention, dynamic=False)
