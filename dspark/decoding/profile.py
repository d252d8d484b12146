"""How many verification passes a target makes per second, by the number of tokens in one pass.

Timed through the engine's own store, on random tokens at one context length. Shape suffixes: R rows, Q positions of a
pass.
"""

import statistics
import time
from collections.abc import Sequence

import torch

from dspark.decoding.kv import Aim, AimedCache, target_store
from dspark.decoding.schedule import StepRates
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
    """Passes per second by tokens in a pass: the median of `repeats` passes of each of `shapes`.

    Every row holds `context` tokens already. A pass gives states for the drafter (`taps`) and logits for the test, as a
    round of the engine does; drafting and bookkeeping are not in it.
    """
    most = max(rows for rows, _ in shapes)
    widest = max(width for _, width in shapes)
    store = target_store(target.config, most, target.device, target.dtype)
    store.reserve(context + widest)
    generator = torch.Generator().manual_seed(0)
    ids_RQ = torch.randint(target.vocab_size, (most, widest), generator=generator).to(target.device)
    rates = []
    for rows, width in shapes:
        positions_RQ = (context + torch.arange(width, device=target.device)).expand(rows, width)
        aim = Aim(0, positions_RQ, context + width)
        seconds = []
        for _ in range(_WARM_UP + repeats):
            start = _now(target)
            cache = AimedCache(store, aim)
            states = target.states(ids_RQ[:rows, :width], tuple(taps), positions_RQ, aim.visible(), cache)
            target.vocabulary.logits(states.final)
            seconds.append(_now(target) - start)
        rates.append(1 / statistics.median(seconds[_WARM_UP:]))
    return StepRates(tuple(rows * width for rows, width in shapes), tuple(rates))


def _now(target: Target) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()
