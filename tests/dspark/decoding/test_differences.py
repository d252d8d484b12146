"""Where a text leaves another, and how nearly the target's two likeliest tokens tied there."""

import pytest
import torch

from dspark.decoding.differences import first_difference
from dspark.decoding.engine import Engine, Request, Sampling
from tests.dspark.decoding.decoders import small_vocabulary_target

PROMPT = (1, 2, 3)


def test_equal_texts_have_no_difference() -> None:
    target = small_vocabulary_target(6)
    assert first_difference(target, PROMPT, (4, 5), (4, 5)) is None
    assert first_difference(target, PROMPT, (4, 5), [4, 5]) is None


@pytest.mark.parametrize(("other", "place"), [((4, 0, 1), 1), ((5, 5, 1), 0), ((4, 5), 2)])
def test_the_gap_is_that_of_the_two_likeliest_tokens_behind_what_both_share(other: tuple[int, ...], place: int) -> None:
    target, plain = small_vocabulary_target(6), (4, 5, 1)
    with torch.no_grad():
        logits = target.model(torch.tensor([[*PROMPT, *plain[:place]]])).logits[0, -1].sort(descending=True).values
    found = first_difference(target, PROMPT, plain, other)
    assert found is not None and found.place == place
    assert found.gap == pytest.approx(float(logits[0] - logits[1]), rel=1e-3)
    assert found.roundings == pytest.approx(found.gap / (2**-23 * abs(float(logits[0]))), rel=1e-3)


def test_a_wrong_token_of_a_text_that_was_decoded_lies_far_from_a_tie() -> None:
    target = small_vocabulary_target(6)
    (right,) = Engine(target, None, 1, 40).generate([Request("a", PROMPT, 12, Sampling())])
    wrong = [*right.tokens[:7], (right.tokens[7] + 1) % 6, *right.tokens[8:]]
    found = first_difference(target, PROMPT, right.tokens, wrong)
    assert found is not None and found.place == 7 and found.roundings > 100
