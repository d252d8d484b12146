"""How many verification passes a target makes per second, by the number of tokens in one pass.

Timed through the engine's own store, on random tokens at one context length. Shape suffixes: R rows, Q positions of a
pass.
"""

import statistics
import time
from collections.abc import Sequence

import torch
from sklearn.isotonic import IsotonicRegression
from torch import Tensor

from dspark.decoding.kv import AimedCache, PackedAim, Store, target_store
from dspark.decoding.schedule import StepRates
from dspark.packed import Packed
from dspark.target import Target

_WARM_UP = 2  # passes that are not counted


def pass_shapes(batch: int, block: int) -> list[tuple[int, int]]:
    """(rows, positions per row) of the passes to time, each with more tokens than the one before.

    First one position in ever more rows, then all `batch` rows with ever more drafts, up to a block and its anchor.
    """
    rows = [(2**power, 1) for power in range(batch.bit_length()) if 2**power < batch]
    return rows + [(batch, width) for width in range(1, block + 2)]


@torch.inference_mode()
def measure_step_rates(
    target: Target, taps: Sequence[int], shapes: Sequence[tuple[int, int]], context: int, repeats: int
) -> StepRates:
    """Passes per second by tokens in a pass: from the median of `repeats` passes of each of `shapes`, smoothed.

    Every row holds `context` tokens already. A pass gives states for the drafter (`taps`) and logits for the test, as a
    round of the engine does; drafting and bookkeeping are not in it.
    """
    most = max(rows for rows, _ in shapes)
    widest = max(width for _, width in shapes)
    store = target_store(target.config, most, target.device, target.dtype)
    store.reserve(context + widest)
    generator = torch.Generator().manual_seed(0)
    ids_RQ = torch.randint(target.vocab_size, (most, widest), generator=generator).to(target.device)
    seconds: list[list[float]] = [[] for _ in shapes]
    # Shapes take turns, so that a machine that becomes slower meanwhile does not make some of them look dear.
    for _ in range(_WARM_UP + repeats):
        for (rows, width), found in zip(shapes, seconds, strict=True):
            start = _now(target)
            _verify(target, store, ids_RQ[:rows, :width], taps, context)
            found.append(_now(target) - start)
    medians = [statistics.median(found[_WARM_UP:]) for found in seconds]
    return step_rates([rows * width for rows, width in shapes], medians)


def step_rates(tokens: Sequence[int], seconds: Sequence[float]) -> StepRates:
    """Rates of passes that took so long, made to fall: where more tokens took less time, both get their mean.

    No pass is faster for holding more. Where noise says so, the scheduler would stop in front of a number of tokens
    that looks dear, or fill passes up to one that looks cheap.
    """
    smooth = IsotonicRegression().fit_transform(list(tokens), list(seconds))
    return StepRates(tuple(tokens), tuple(1 / float(one) for one in smooth))


def _verify(target: Target, store: Store, ids_RQ: Tensor, taps: Sequence[int], context: int) -> None:
    """One pass over tokens behind `context` others, packed as the engine's."""
    rows, width = ids_RQ.shape
    packed = Packed([context] * rows, [width] * rows, ids_RQ.device)
    cache = AimedCache(store, PackedAim(packed))
    states = target.states(ids_RQ.reshape(1, -1), taps, cache=cache, packed=packed)
    target.decoding_vocabulary.logits(states.final[0])


def _now(target: Target) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()
