"""Attention of groups over ranges of context columns, one dense tile after the other: exact, on any device.

A tile is a run of groups of one row and the columns that any of them sees. Groups are cut into tiles where that saves
more cells than another tile costs, so groups with a short range do not pay for the longest one. All query heads of a
key head are rows of the same product, so no key is repeated. The backward computes the probabilities once more; beside
its inputs and outputs, and the context in fp32, the function holds two tiles of scores and never all of them.

Shape suffixes: B batch, A groups, N heads, G key/value heads, R query heads of a key head, Q queries (A groups of K
slots), S context columns, E extra keys of each group, D head width, M query rows of a tile (groups, slots, R query
heads), C columns of a tile.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

# Cells of scores whose products cost about as much as the calls of one more tile.
TILE_COST = 2**14
# Most cells of a tile, unless one group alone has more: the scores of a tile stay in the processor's cache.
MOST_CELLS = 2**19
# In place of the logarithm of an empty sum, so that differences of logarithms stay numbers.
_LOWEST = -1e30


class Tile(NamedTuple):
    """Groups first .. last-1 of a row of the batch, and the context columns start .. limit-1 that any of them sees."""

    row: int
    first: int
    last: int
    start: int
    limit: int
    even: int  # columns below are seen by all groups
    hidden: Tensor | None  # fp32 [groups, 1, limit - even]: minus infinity where a group does not see the column


def tiles_of(
    ranges: Sequence[Sequence[tuple[int, int]]],
    rows: int,
    device: torch.device | None = None,
    cost: int = TILE_COST,
    most: int = MOST_CELLS,
) -> tuple[Tile, ...]:
    """Tiles that cover every group once; `ranges` are (start, limit) by row and group, `rows` query rows of a group.

    A cut must save more than `cost` cells, and a tile of several groups has at most `most`.
    """
    tiles = []
    for row, own in enumerate(ranges):
        starts, limits = np.array(own, dtype=np.int64).reshape(-1, 2).T
        depths = np.maximum(limits - starts, 0)
        # Within a tile groups begin at one column, and those that see nothing are among themselves.
        new = (starts[1:] != starts[:-1]) | ((depths[1:] == 0) != (depths[:-1] == 0))
        edges = [0, *(np.flatnonzero(new) + 1).tolist(), len(own)]
        for first, last in pairwise(edges):
            for one, end in _cuts(depths * rows, first, last, cost, most):
                tiles.append(_tile(row, one, end, int(starts[one]), (starts + depths)[one:end], device))
    return tuple(tiles)


def _cuts(cells: NDArray[np.int64], first: int, last: int, cost: int, most: int) -> list[tuple[int, int]]:
    """Stretches of the groups first .. last-1 by bisection, each time where it saves most; `cells` of each group."""
    own, count = cells[first:last], last - first
    if count == 1:
        return [(first, last)]
    before, behind = np.maximum.accumulate(own), np.maximum.accumulate(own[::-1])[::-1]
    left = np.arange(1, count)
    apart = left * before[:-1] + (count - left) * behind[1:]
    cut, whole = int(apart.argmin()) + 1, int(count * before[-1])
    if whole - apart[cut - 1] <= cost:
        if whole <= most:
            return [(first, last)]
        cut = count // 2
    return _cuts(cells, first, first + cut, cost, most) + _cuts(cells, first + cut, last, cost, most)


def _tile(row: int, first: int, last: int, start: int, limits: NDArray[np.int64], device: torch.device | None) -> Tile:
    even, limit = int(limits.min()), int(limits.max())
    hidden = None
    if even < limit:
        behind = np.arange(even, limit) >= limits[:, None, None]
        hidden = torch.from_numpy(np.where(behind, np.float32(-np.inf), np.float32(0))).to(device)
    return Tile(row, first, last, start, limit, even, hidden)


class TiledAttention(torch.autograd.Function):
    """softmax(scale q k) v over each group's context range and own keys; zero for a group that sees nothing.

    `apply(queries [B, N, Q, D], context keys and values [B, G, S, D], own keys and values [B, G, A, E, D], tiles,
    scale)` gives [B, Q, N, D]. Everything between is fp32 (or fp64, if the queries are), whatever the inputs are.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor,
        tiles: tuple[Tile, ...], scale: float,
    ) -> Tensor:  # fmt: skip
        batch, heads, length, width = queries.shape
        out_BQND = queries.new_empty(batch, length, heads, width)
        space = _Space(queries, own_keys, tiles, score_tiles=1, row_tiles=2)
        log_sums = queries.new_empty(batch, keys.shape[1], length * heads // keys.shape[1], dtype=space.dtype)
        keys_BGSD, values_BGSD = keys.to(space.dtype), values.to(space.dtype)
        for tile in tiles:
            q_GMD = space.rows(0, queries, tile).mul_(scale)
            out_GMD = space.empty_rows(1, tile)
            own = space.own(own_keys, tile), space.own(own_values, tile)
            span = tile.row, slice(None), slice(tile.start, tile.limit)
            log_GM1 = _attend(space, tile, q_GMD, (keys_BGSD[span], values_BGSD[span]), own, out_GMD)
            log_sums[tile.row, :, space.span(tile)] = log_GM1.squeeze(-1)
            space.put_back(out_GMD, out_BQND, tile)
        ctx.save_for_backward(queries, keys, values, own_keys, own_values, out_BQND, log_sums)
        ctx.tiles, ctx.scale = tiles, scale
        return out_BQND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_BQND: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, own_keys, own_values, out_BQND, log_sums = ctx.saved_tensors
        space = _Space(queries, own_keys, ctx.tiles, score_tiles=2, row_tiles=3)
        keys_BGSD, values_BGSD = keys.to(space.dtype), values.to(space.dtype)
        d_keys, d_values = torch.zeros_like(keys_BGSD), torch.zeros_like(values_BGSD)
        d_queries = torch.empty_like(out_BQND)
        d_own_keys, d_own_values = torch.empty_like(own_keys), torch.empty_like(own_values)
        for tile in ctx.tiles:
            q_GMD = space.rows(0, queries, tile).mul_(ctx.scale)
            d_out_GMD = space.rows(1, d_out_BQND.transpose(1, 2), tile)
            # What all probabilities of a row lose when one of them gains.
            shared_GM1 = space.rows(2, out_BQND.transpose(1, 2), tile).mul_(d_out_GMD).sum(-1, keepdim=True)
            known = log_sums[tile.row, :, space.span(tile), None], shared_GM1
            d_q_GMD = space.empty_rows(2, tile).zero_()
            if tile.limit > tile.start:
                span = tile.row, slice(None), slice(tile.start, tile.limit)
                p_GMC, d_GMC = space.scores(0, tile), space.scores(1, tile)
                _scores(tile, q_GMD, keys_BGSD[span], p_GMC)
                torch.bmm(d_out_GMD, values_BGSD[span].transpose(1, 2), out=d_GMC)
                _to_gradients(p_GMC, d_GMC, *known)
                d_values[span].baddbmm_(p_GMC.transpose(1, 2), d_out_GMD)
                d_keys[span].baddbmm_(d_GMC.transpose(1, 2), q_GMD)
                torch.bmm(d_GMC, keys_BGSD[span], out=d_q_GMD)
            if space.extra:
                groups = tile.row, slice(None), slice(tile.first, tile.last)
                own_k, own_v = space.own(own_keys, tile), space.own(own_values, tile)
                q, d_out, d_q = (space.by_group(part, tile) for part in (q_GMD, d_out_GMD, d_q_GMD))
                p, d = torch.bmm(q, own_k.transpose(1, 2)), torch.bmm(d_out, own_v.transpose(1, 2))
                _to_gradients(p, d, *(space.by_group(part, tile) for part in known))
                d_own_values[groups] = torch.bmm(p.transpose(1, 2), d_out).view_as(d_own_values[groups])
                d_own_keys[groups] = torch.bmm(d.transpose(1, 2), q).view_as(d_own_keys[groups])
                d_q.baddbmm_(d, own_k)
            space.put_back(d_q_GMD.mul_(ctx.scale), d_queries, tile)
        gradients = d_queries.transpose(1, 2), d_keys.to(keys.dtype), d_values.to(values.dtype)
        return *gradients, d_own_keys, d_own_values, None, None


def _attend(
    space: "_Space", tile: Tile, q_GMD: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], out: Tensor
) -> Tensor:
    """Writes a tile's result [G, M, D] into `out`; returns the logarithms [G, M, 1] of its sums of exponentials."""
    (keys_GCD, values_GCD), (own_keys, own_values) = context, own
    p_GMC = space.scores(0, tile)
    own_p = torch.bmm(space.by_group(q_GMD, tile), own_keys.transpose(1, 2))
    largest_GM1 = torch.full_like(q_GMD[..., :1], _LOWEST)
    sums_GM1 = torch.zeros_like(largest_GM1)
    if tile.limit > tile.start:
        _scores(tile, q_GMD, keys_GCD, p_GMC)
        largest_GM1 = torch.maximum(largest_GM1, p_GMC.amax(-1, keepdim=True))
    if space.extra:
        largest_GM1 = torch.maximum(largest_GM1, own_p.amax(-1, keepdim=True).view_as(largest_GM1))
    if tile.limit > tile.start:
        p_GMC.sub_(largest_GM1).exp_()
        sums_GM1 += p_GMC.sum(-1, keepdim=True)
        torch.bmm(p_GMC, values_GCD, out=out)
    else:
        out.zero_()
    if space.extra:
        own_p.sub_(space.by_group(largest_GM1, tile)).exp_()
        sums_GM1 += own_p.sum(-1, keepdim=True).view_as(sums_GM1)
        space.by_group(out, tile).baddbmm_(own_p, own_values)
    # A sum that is not empty is at least one.
    sums_GM1.clamp_(min=1)
    out.mul_(sums_GM1.reciprocal())
    return largest_GM1 + sums_GM1.log()


def _scores(tile: Tile, q_GMD: Tensor, keys_GCD: Tensor, out_GMC: Tensor) -> None:
    """Scores of a tile; minus infinity where a group does not see a column."""
    torch.bmm(q_GMD, keys_GCD.transpose(1, 2), out=out_GMC)
    if tile.hidden is not None:
        uneven = out_GMC.unflatten(1, (tile.last - tile.first, -1))[..., tile.even - tile.start :]
        uneven += tile.hidden


def _to_gradients(scores: Tensor, d_probabilities: Tensor, log_sums: Tensor, shared: Tensor) -> None:
    """In place: scores become probabilities, and gradients of probabilities become those of scores."""
    scores.sub_(log_sums).exp_()
    d_probabilities.sub_(shared).mul_(scores)


class _Space:
    """Buffers that every tile uses anew, and the order of a tile's query rows: group, slot, query head of a key head.

    Fresh memory for every tile would cost as much as its products.
    """

    def __init__(
        self, queries_BNQD: Tensor, own_BGAED: Tensor, tiles: Sequence[Tile], score_tiles: int, row_tiles: int
    ) -> None:
        self.heads, groups, self.extra, self.width = own_BGAED.shape[1:]
        self.repeats, self.slots = queries_BNQD.shape[1] // self.heads, queries_BNQD.shape[2] // groups
        self.dtype = torch.float64 if queries_BNQD.dtype == torch.float64 else torch.float32
        most = max(self._count(tile) for tile in tiles)
        cells = max(self._count(tile) * (tile.limit - tile.start) for tile in tiles)
        self._rows = queries_BNQD.new_empty(row_tiles, most * self.width, dtype=self.dtype)
        self._scores = queries_BNQD.new_empty(score_tiles, cells, dtype=self.dtype)

    def _count(self, tile: Tile) -> int:
        return self.heads * (tile.last - tile.first) * self.slots * self.repeats

    def span(self, tile: Tile) -> slice:
        """The tile's rows among all of a key head."""
        size = self.slots * self.repeats
        return slice(tile.first * size, tile.last * size)

    def empty_rows(self, number: int, tile: Tile) -> Tensor:
        """Buffer [G, M, D], whatever it held."""
        return self._rows[number, : self._count(tile) * self.width].view(self.heads, -1, self.width)

    def scores(self, number: int, tile: Tile) -> Tensor:
        """Buffer [G, M, C], whatever it held."""
        columns = tile.limit - tile.start
        count = self._count(tile)
        return self._scores[number, : count * columns].view(self.heads, count // self.heads, columns)

    def rows(self, number: int, x_BNQD: Tensor, tile: Tile) -> Tensor:
        """Query rows [G, M, D] of a tile, in a buffer."""
        into = self.empty_rows(number, tile)
        return self._by_query(into).copy_(self._tile_of(x_BNQD, tile)).view_as(into)

    def put_back(self, x_GMD: Tensor, into_BQND: Tensor, tile: Tile) -> None:
        """Writes query rows of a tile where their queries stand."""
        self._tile_of(into_BQND.transpose(1, 2), tile).copy_(self._by_query(x_GMD))

    def own(self, x_BGAED: Tensor, tile: Tile) -> Tensor:
        """Own keys or values of a tile's groups: a batch [G * groups, E, D]."""
        return x_BGAED[tile.row, :, tile.first : tile.last].to(self.dtype).flatten(0, 1)

    def by_group(self, x_GMX: Tensor, tile: Tile) -> Tensor:
        """Query rows as a batch [G * groups, K * R, X]; a view of a buffer is one."""
        return x_GMX.reshape(self.heads * (tile.last - tile.first), self.slots * self.repeats, -1)

    def _tile_of(self, x_BNQD: Tensor, tile: Tile) -> Tensor:
        """View [G, queries, R, D] of a tile's part."""
        own = x_BNQD[tile.row, :, tile.first * self.slots : tile.last * self.slots]
        return own.unflatten(0, (self.heads, self.repeats)).transpose(1, 2)

    def _by_query(self, x_GMD: Tensor) -> Tensor:
        return x_GMD.unflatten(1, (-1, self.repeats))
