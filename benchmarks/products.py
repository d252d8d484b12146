"""The least matrix products of a training step, alone: what forward and backward multiply, and nothing between."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.model.drafter import Drafter
from dspark.model.vocabulary import Vocabulary
from dspark.training.blocks import Blocks

# Left operands and outputs have so many numbers at most, and longer ones are worked off in stretches: fresh memory is
# no part of a product.
_NUMBERS = 2**25
# Groups of blocks whose prefixes count as equally long.
_GROUPS = 16


class Product(NamedTuple):
    """[rows, inner] @ [inner, columns], made `times` times."""

    rows: int
    inner: int
    columns: int
    times: int = 1


def least_products(drafter: Drafter, vocabulary: Vocabulary, blocks: Blocks) -> list[Product]:
    """Products of one step on a batch of one row.

    Context columns are those below the last anchor; only supervised slots and the distinct columns under them are
    projected to the vocabulary, the vanilla bias once per column. Taps and head are frozen: they want no gradient.
    """
    config, slots = drafter.config, blocks.used
    queries, context = int(blocks.keep_BA.sum()) * blocks.block, int(blocks.anchors_BA.max())
    heads, keys = config.heads * config.head_dim, 2 * config.kv_heads * config.head_dim
    hidden, wide, tokens, rank = config.hidden, config.intermediate, config.vocab, config.markov_rank
    supervised, columns = len(slots.index_N), len(slots.place_P)

    def trained(rows: int, inner: int, outer: int, times: int = 1, frozen_input: bool = False) -> list[Product]:
        backward = [] if frozen_input else [Product(rows, outer, inner, times)]
        return [Product(rows, inner, outer, times), Product(inner, rows, outer, times), *backward]

    found = trained(context, len(config.taps) * hidden, hidden, frozen_input=True)
    for rows, inner, outer in (
        (context, hidden, keys),
        (queries, hidden, heads + keys),
        (queries, heads, hidden),
        (queries, hidden, 2 * wide),
        (queries, wide, hidden),
    ):
        found += trained(rows, inner, outer, config.layers)
    found += attention_products(
        blocks, config.layers * config.kv_heads, config.heads // config.kv_heads, config.head_dim
    )
    found += trained(columns, rank, tokens)
    found += [
        Product(columns, hidden, tokens),
        Product(supervised, hidden, tokens),
        Product(supervised, tokens, hidden),
    ]
    return found


def attention_products(blocks: Blocks, times: int, shared: int, width: int) -> list[Product]:
    """Scores and mixtures of each block over its prefix and itself, forward (2) and backward (4)."""
    lengths = sorted(blocks.anchors_BA[blocks.keep_BA].tolist())
    size = math.ceil(len(lengths) / _GROUPS)
    found = []
    for first in range(0, len(lengths), size):
        group = lengths[first : first + size]
        seen = round(sum(group) / len(group)) + blocks.block
        rows = len(group) * blocks.block * shared
        found += [
            Product(rows, width, seen, 2 * times),  # scores; gradient of the probabilities
            Product(rows, seen, width, 2 * times),  # mixture; gradient of the queries
            Product(width, rows, seen, 2 * times),  # gradients of keys and values
        ]
    return found


def products_of(drafter: Drafter, vocabulary: Vocabulary, blocks: Blocks) -> Callable[[], None]:
    """A function that makes them all, from the same operands and into the same memory."""
    weight = drafter.fc.weight
    products = least_products(drafter, vocabulary, blocks)
    right = torch.randn(max(product.inner * product.columns for product in products))
    left, output = torch.randn(_NUMBERS), torch.empty(_NUMBERS)
    buffers = [buffer.to(weight.device, weight.dtype) for buffer in (left, right, output)]

    def run() -> None:
        for product in products:
            for _ in range(product.times):
                _multiply(product, *buffers)

    return run


def _multiply(product: Product, left: Tensor, right: Tensor, output: Tensor) -> None:
    rows, inner, columns, _ = product
    step = max(1, len(output) // max(inner, columns))
    for first in range(0, rows, step):
        part = min(step, rows - first)
        torch.mm(
            left[: part * inner].view(part, inner),
            right[: inner * columns].view(inner, columns),
            out=output[: part * columns].view(part, columns),
        )
