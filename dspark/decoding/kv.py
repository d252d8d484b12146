"""Keys and values of many requests at once, each row with its own length, written in place.

A position is written when its token is computed and read by queries at or behind it. Rejected tokens are not removed:
the row's length moves back and the next round writes over them. Nothing is copied or grown while requests are decoded.
Shape suffixes: R rows of the store, B rows of a call, Q positions of a call, N single positions, G key/value heads,
M positions that a row can hold, L positions in use, D head width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from dspark.model.attention import KeyValues, Room
from dspark.model.config import DraftConfig
from dspark.model.families import head_shape
from dspark.packed import Packed

# Widths are multiples of this, so that requests of similar length share one allocation.
_GRAIN = 64


class Store:
    """Keys and values [R, G, M, D] of every layer of a model; M grows only by `reserve`.

    `shapes` holds (G, D) of each layer; G = 0 for a layer that keeps nothing. In memory a position's heads stand
    together, so that a position is written as one piece.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], rows: int, device: torch.device, dtype: torch.dtype) -> None:
        empty = [torch.zeros(rows, heads, 0, head_dim, device=device, dtype=dtype) for heads, head_dim in shapes]
        self.layers = [KeyValues(keys, keys) for keys in empty]

    @property
    def width(self) -> int:
        """M."""
        return self.layers[0].keys.shape[2]

    def reserve(self, length: int) -> None:
        """Makes room for `length` positions per row. What the rows held is lost: no row may be in use."""
        if length <= self.width:
            return
        width = -(-length // _GRAIN) * _GRAIN
        for number, (keys, _) in enumerate(self.layers):
            rows, heads, _, head_dim = keys.shape
            shape = (rows, width, heads, head_dim)
            # Zeros, not uninitialised memory: a masked NaN value would still spoil an attention sum.
            both = KeyValues(keys.new_zeros(shape), keys.new_zeros(shape))
            self.layers[number] = KeyValues(*(part.transpose(1, 2) for part in both))

    def places(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Where `write` finds rows and positions, index tensors that broadcast to N numbers in all, until `reserve`."""
        return (rows * self.width + positions).flatten()

    def write(self, layer: int, places_N: Tensor, new: KeyValues) -> None:
        """Keys and values [..., G, positions, D] of one layer, N positions in all, at these places."""
        for held, part in zip(self.layers[layer], new, strict=True):
            flat = held.transpose(1, 2).flatten(0, 1)
            flat.index_copy_(0, places_N, part.transpose(-3, -2).reshape(len(places_N), *flat.shape[1:]))

    def view(self, layer: int, first: int, count: int, length: int) -> KeyValues:
        """Rows first .. first+count-1 of one layer up to `length`, without a copy: [count, G, length, D]."""
        keys, values = self.layers[layer]
        return KeyValues(keys[first : first + count, :, :length], values[first : first + count, :, :length])

    def rooms(self, rows_R1: Tensor, positions_RQ: Tensor, length: int) -> list[Room]:
        """All layers for a pass of a drafter over the store's first rows, whose own keys belong at these positions."""

        places_N = self.places(rows_R1, positions_RQ)

        def room(layer: int) -> Room:
            return Room(self.view(layer, 0, len(rows_R1), length), lambda own: self.write(layer, places_N, own))

        return [room(layer) for layer in range(len(self.layers))]

    def move(self, source: int, to: int, length: int) -> None:
        """Copies the first `length` positions of a row over another: when a request ends, never for a round."""
        for keys, values in self.layers:
            keys[to, :, :length] = keys[source, :, :length]
            values[to, :, :length] = values[source, :, :length]


def target_store(config: Any, rows: int, device: torch.device, dtype: torch.dtype) -> Store:
    """An empty store for a target of this transformers configuration.

    Sliding layers keep whole texts too: what their window hides is masked, not dropped.
    """
    sharing = getattr(config, "kv_sharing_modes", [None] * config.num_hidden_layers)
    shapes = [head_shape(config, layer) for layer in range(config.num_hidden_layers)]
    # A layer that reuses the keys and values of an earlier one writes none.
    kept = [(0 if mode == "reuse" else heads, width) for mode, (heads, width) in zip(sharing, shapes, strict=True)]
    return Store(kept, rows, device, dtype)


def context_store(config: DraftConfig, rows: int, device: torch.device, dtype: torch.dtype) -> Store:
    """An empty store for a drafter's keys and values of context features."""
    return Store([(config.kv_heads, config.head_dim)] * config.layers, rows, device, dtype)


class Aim:
    """Where one forward of the target writes, and how far it sees.

    Its rows are first, first+1, ...; row b computes the tokens at `positions_BQ[b]`, all below `length` = L.
    """

    def __init__(self, first: int, positions_BQ: Tensor, length: int) -> None:
        self.first, self.count = first, len(positions_BQ)
        self.positions_BQ, self.length = positions_BQ, length
        self.rows_BQ = torch.arange(first, first + self.count, device=positions_BQ.device)[:, None]

    def visible(self) -> Tensor:
        """Mask bool [B, 1, Q, L]: each query sees its row up to its own position, so nothing that is stale."""
        columns_L = torch.arange(self.length, device=self.positions_BQ.device)
        return (columns_L <= self.positions_BQ[..., None]).unsqueeze(1)


class PackedAim(Aim):
    """The aim of a pass over the store's first rows, whose tokens are packed as one: B = 1."""

    def __init__(self, packed: Packed) -> None:
        self.first, self.count = 0, packed.rows
        self.positions_BQ, self.length = packed.positions_N[None], packed.length
        self.rows_BQ = packed.rows_N[None]


class AimedCache(Cache):
    """A target's store in the form that transformers takes, for one forward."""

    def __init__(self, store: Store, aim: Aim) -> None:
        places_N = store.places(aim.rows_BQ, aim.positions_BQ)
        super().__init__(layers=[_AimedLayer(store, number, aim, places_N) for number in range(len(store.layers))])


class _AimedLayer(CacheLayerMixin):
    """One layer, as transformers' attention calls it."""

    def __init__(self, store: Store, number: int, aim: Aim, places_N: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.store, self.number, self.aim, self.places_N = store, number, aim, places_N

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes [B, G, Q, D] where the forward aims and returns what it may look at, views [B, G, L, D]."""
        self.store.write(self.number, self.places_N, KeyValues(key_states, value_states))
        return self.store.view(self.number, self.aim.first, self.aim.count, self.aim.length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.aim.length, 0

    def get_seq_length(self) -> int:
        return self.aim.length - self.aim.positions_BQ.shape[1]

    def get_max_length(self) -> int:
        return self.store.width

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is lazy: the store has been reserved."""
