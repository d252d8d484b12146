"""The matrix products of decoding passes alone: all weights that a pass reads, each times as many rows.

Kinds of passes take turns within one cycle, as in a round: weights that another pass pushes out of the processor's
caches are read from memory here too.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dspark.model.drafter import Drafter
from dspark.model.vocabulary import Vocabulary
from dspark.target import Target


class Product(NamedTuple):
    """`rows` rows times the transpose of a weight."""

    weight: Tensor
    rows: int


def target_products(target: Target, rows: int) -> list[Product]:
    """A pass of the target over `rows` tokens, its head included."""
    return [
        *(Product(weight, rows) for weight in _linear(target.decoder)),
        Product(target.decoding_vocabulary.head_VH, rows),
    ]


def draft_products(drafter: Drafter, vocabulary: Vocabulary, context: int) -> list[Product]:
    """Both sides of a drafter's round at batch 1: `context` committed tokens taken in, a block proposed."""
    config, layers = drafter.config, drafter.layers
    found = [Product(drafter.fc.weight.detach(), context)]
    for layer in layers:
        keys_values = [layer.self_attn.k_proj, layer.self_attn.v_proj]
        found += [Product(part.weight.detach(), context) for part in keys_values if part is not None]
    found += [Product(weight, config.block) for layer in layers for weight in _linear(layer)]
    found.append(Product(vocabulary.narrowed(drafter.kept).for_few_rows().draft_head_DH, config.block))
    if drafter.markov_head is not None:
        # Slot by slot, since each slot's token decides about the next one's bias.
        found += [Product(weight, 1) for weight in _linear(drafter.markov_head)] * config.block
    if drafter.confidence_head is not None:
        found += [Product(weight, config.block) for weight in _linear(drafter.confidence_head)]
    return found


def measured(passes: Mapping[str, Sequence[Product]], cycles: int) -> dict[str, float]:
    """Seconds of each of the passes: medians over cycles in which they take turns."""
    every = {product for products in passes.values() for product in products}
    inputs = {(one.rows, one.weight.shape[1]): one.weight.new_ones(one.rows, one.weight.shape[1]) for one in every}
    outputs = {(one.rows, one.weight.shape[0]): one.weight.new_empty(one.rows, one.weight.shape[0]) for one in every}
    spent: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(cycles + 1):
        for name, products in passes.items():
            since = time.perf_counter()
            for weight, rows in products:
                torch.mm(inputs[rows, weight.shape[1]], weight.t(), out=outputs[rows, weight.shape[0]])
            if products[0].weight.is_cuda:
                torch.cuda.synchronize()
            spent[name].append(time.perf_counter() - since)
    return {name: statistics.median(seconds[1:]) for name, seconds in spent.items()}


def _linear(module: nn.Module) -> list[Tensor]:
    return [part.weight.detach() for part in module.modules() if isinstance(part, nn.Linear)]
