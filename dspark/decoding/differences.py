"""Where a speculative text leaves plain decoding's at temperature 0, and how nearly two tokens tied there.

In fp32 the two are equal. In bf16 a pass of other shape rounds otherwise, and the likeliest of two near tokens may
change; a gap that is wide beside the rounding of a logit says that something else is wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark.target import Target


@dataclass(frozen=True)
class Difference:
    """The first token of an answer that is not plain decoding's, counted from 0."""

    place: int
    gap: float  # the likeliest token's logit less the next one's, behind the tokens that both texts share
    roundings: float  # the gap in units of what the compute type rounds such a logit to


@torch.inference_mode()
def first_difference(
    target: Target, prompt: Sequence[int], plain: Sequence[int], speculative: Sequence[int]
) -> Difference | None:
    """None where both answers are the same. One pass of the target over the shared text otherwise."""
    if list(plain) == list(speculative):
        return None
    pairs = enumerate(zip(plain, speculative, strict=False))
    place = next((place for place, (one, other) in pairs if one != other), min(len(plain), len(speculative)))
    shared = torch.tensor([[*prompt, *plain[:place]]], device=target.device)
    final_H = target.states(shared, ()).final[0, -1]
    top, second = target.vocabulary.logits(final_H).topk(2).values.float().tolist()
    step = torch.finfo(target.dtype).eps * abs(top)
    return Difference(place, top - second, (top - second) / step if step else 0.0)
