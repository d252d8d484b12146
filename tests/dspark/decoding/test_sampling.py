"""Distributions and draws against literals, and the law of judged drafts against the target's."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, tensor

from dspark.decoding.sampling import Place, Purpose, Sampler, Sampling, distribution, draw, uniform
from dspark.errors import InputError
from dspark.model.vocabulary import Vocabulary

CPU = torch.device("cpu")
ALL = Vocabulary(torch.zeros(1, 1), torch.zeros(1, 1))  # a drafter that may propose every token
LAST = 1 - 2.0**-52  # the largest number that `uniform` can give
PURPOSES: tuple[Purpose, ...] = ("draft", "accept", "next")


def close(found: Tensor, wanted: list[float]) -> bool:
    return torch.allclose(found, torch.tensor(wanted, dtype=torch.float32), atol=1e-6)


def test_temperature_zero_is_all_mass_on_the_first_likeliest_token() -> None:
    assert distribution(tensor([1.0, 3.0, 3.0]), Sampling()).tolist() == [0, 1, 0]


def test_temperature_divides_the_logits_before_the_softmax() -> None:
    logits = tensor([1.0, 2.0, 4.0]).log()
    assert close(distribution(logits, Sampling(temperature=1)), [1 / 7, 2 / 7, 4 / 7])
    assert close(distribution(logits, Sampling(temperature=0.5)), [1 / 21, 4 / 21, 16 / 21])


def test_top_k_keeps_exactly_k_tokens_even_where_logits_are_equal() -> None:
    kept = distribution(tensor([2.0, 1.0, 1.0, 1.0]), Sampling(temperature=1, top_k=2))
    assert (kept > 0).sum() == 2 and kept[0] > kept[1:].max()


def test_top_p_keeps_the_smallest_set_of_likeliest_tokens_that_reaches_the_mass() -> None:
    logits = tensor([0.2, 0.5, 0.3]).log()
    assert close(distribution(logits, Sampling(temperature=1, top_p=0.6)), [0, 0.625, 0.375])
    assert close(distribution(logits, Sampling(temperature=1, top_p=0.4)), [0, 1, 0])
    assert close(distribution(logits, Sampling(temperature=1, top_p=0.81)), [0.2, 0.5, 0.3])


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    logits = tensor([0.4, 0.3, 0.2, 0.1]).log()
    # After top-k 2 the likeliest token holds 4/7 = 0.571 of the mass.
    assert close(distribution(logits, Sampling(temperature=1, top_k=2, top_p=0.57)), [1, 0, 0, 0])
    assert close(distribution(logits, Sampling(temperature=1, top_k=2, top_p=0.58)), [4 / 7, 3 / 7, 0, 0])


def test_min_p_keeps_what_reaches_its_share_of_the_likeliest_token() -> None:
    logits = tensor([0.1, 0.5, 0.3, 0.1]).log()
    assert close(distribution(logits, Sampling(temperature=1, min_p=0.59)), [0, 0.625, 0.375, 0])
    assert close(distribution(logits, Sampling(temperature=1, min_p=0.61)), [0, 1, 0, 0])
    assert close(distribution(tensor([1.0, 1.0, 0.0]), Sampling(temperature=1, min_p=1.0)), [0.5, 0.5, 0])


def test_min_p_comes_last_so_top_p_counts_the_tokens_that_it_leaves_out() -> None:
    logits = tensor([0.5, 0.3, 0.1, 0.1]).log()
    # Of the three tokens that reach 0.85, the third has less than 0.3 of the first one's 0.5.
    assert close(distribution(logits, Sampling(temperature=1, top_p=0.85, min_p=0.3)), [0.625, 0.375, 0, 0])


def test_rows_that_differ_in_min_p_alone_are_drawn_by_their_own_rule() -> None:
    logits = tensor([0.5, 0.3, 0.2]).log().expand(200, 1, 3)
    rules = [Sampling(temperature=1, min_p=0.9 * (row % 2)) for row in range(200)]
    tokens = Sampler(places(rules), CPU).judge(logits, torch.empty(200, 0, dtype=torch.int64), [0] * 200).following
    assert set(tokens[1::2].tolist()) == {0} and set(tokens[::2].tolist()) == {0, 1, 2}


@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=8),
    temperature=st.sampled_from([0.0, 0.1, 1.0, 3.0]),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.05, 0.5, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_every_rule_gives_a_distribution_on_likeliest_tokens(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    probs = distribution(tensor(logits).bfloat16(), Sampling(temperature, top_k, top_p, min_p=min_p))
    assert probs.dtype == torch.float32 and probs.shape == (len(logits),)
    assert abs(probs.sum() - 1) < 1e-5 and probs.min() >= 0
    kept, left_out = tensor(logits).bfloat16()[probs > 0], tensor(logits).bfloat16()[probs == 0]
    # Softmax underflows for tokens that are far behind; none that is left out may beat one that is kept.
    assert left_out.numel() == 0 or kept.min() >= left_out.max()


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
    ],
)
def test_rules_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_random_numbers_are_the_same_in_every_process() -> None:
    assert uniform(7, "a", 3, "draft") == 0.30730482122835
    assert uniform(7, "a", 3, "accept") == 0.15123430492051626
    assert uniform(7, "a", 3, "next") == 0.3527539047953794


def test_random_numbers_of_different_purposes_places_requests_and_seeds_never_coincide() -> None:
    places = list(product((0, 1, 12), ("1", "11", "2/1", ""), range(300)))
    numbers = [uniform(seed, name, position, purpose) for seed, name, position in places for purpose in PURPOSES]
    assert len(set(numbers)) == len(numbers)


def test_random_numbers_are_uniform_and_purposes_are_independent() -> None:
    columns = np.array([[uniform(1, "r", position, purpose) for purpose in PURPOSES] for position in range(20_000)])
    assert columns.min() >= 0 and columns.max() < 1
    histograms = [np.histogram(column, bins=20, range=(0, 1))[0] for column in columns.T]
    assert np.abs(np.array(histograms) - 1000).max() < 150  # 5 deviations
    assert np.abs(np.corrcoef(columns.T) - np.eye(3)).max() < 0.035


def test_a_draw_inverts_the_running_sum() -> None:
    weights = tensor([[1.0, 0.0, 2.0, 1.0]]).expand(6, 4)
    uniforms = tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, LAST], dtype=torch.float64)
    assert draw(weights, uniforms).tolist() == [0, 0, 2, 2, 3, 3]


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 1e-7, 0.3, 1.0]), min_size=1, max_size=9).filter(any),
    number=st.one_of(st.just(0.0), st.just(LAST), st.floats(0, LAST)),
)
def test_a_draw_never_takes_a_token_without_weight(weights: list[float], number: float) -> None:
    token = int(draw(tensor(weights), tensor(number, dtype=torch.float64)))
    assert token < len(weights) and weights[token] > 0


def places(rules: list[Sampling], anchor: int = 0) -> list[Place]:
    return [Place(rule, f"request {number}", anchor) for number, rule in enumerate(rules)]


def test_at_temperature_zero_the_prefix_that_equals_the_argmax_is_accepted() -> None:
    best = tensor([[3, 1, 2], [3, 1, 2], [3, 1, 2], [3, 1, 2]])
    logits = torch.nn.functional.one_hot(best, 5).float()
    drafts = tensor([[3, 1], [3, 0], [0, 1], [3, 1]])
    verdict = Sampler(places([Sampling()] * 4), CPU).judge(logits, drafts, [2, 2, 2, 1])
    assert verdict.accepted.tolist() == [2, 1, 0, 1]  # the last row offered one draft only
    assert verdict.following.tolist() == [2, 1, 3, 1]


def test_a_draft_is_accepted_with_probability_p_over_q_and_else_replaced_from_the_residual() -> None:
    p, q = tensor([0.25, 0.25, 0.5]), tensor([1.0, 0.0, 0.0])
    sampler = Sampler(places([Sampling(temperature=1)] * 200), CPU)
    drafts = sampler.choose(q.log().expand(200, 3), 0, ALL)
    verdict = sampler.judge(p.log().expand(200, 2, 3), drafts[:, None], [1] * 200)
    for row, (accepted, following) in enumerate(zip(*verdict, strict=True)):
        assert drafts[row] == 0
        assert bool(accepted) == (uniform(0, f"request {row}", 1, "accept") < 0.25)
        number = uniform(0, f"request {row}", 2 if accepted else 1, "next")
        residual = p if accepted else tensor([0.0, 0.25, 0.5])
        assert following == draw(residual, tensor(number, dtype=torch.float64))
    assert 20 < verdict.accepted.sum() < 80


def test_rows_with_different_rules_are_judged_as_if_each_were_alone() -> None:
    rules = [Sampling(), Sampling(1.0), Sampling(0.5, top_k=2), Sampling(1.0, seed=4), Sampling()]
    generator = torch.Generator().manual_seed(0)
    drafted, target = torch.randn(2, 5, 3, 6, generator=generator)
    everyone = places(rules, anchor=9)
    proposed = [2, 2, 1, 2, 0]

    def run(rows: list[int]) -> list[list[int]]:
        sampler = Sampler([everyone[row] for row in rows], CPU)
        drafts = torch.stack([sampler.choose(drafted[rows, slot], slot, ALL) for slot in range(2)], dim=1)
        verdict = sampler.judge(target[rows], drafts, [proposed[row] for row in rows])
        return torch.stack((*drafts.unbind(1), *verdict), dim=1).tolist()

    assert run([0, 1, 2, 3, 4]) == [run([row])[0] for row in range(5)]


def speculative_pairs(target: Tensor, drafter: Tensor, rule: Sampling, rows: int) -> Tensor:
    """First two tokens [rows, 2] after token 0, where logits depend on the token before: tables [V, V]; blocks of 2."""
    texts = [[0] for _ in range(rows)]
    while going := [row for row in range(rows) if len(texts[row]) < 3]:
        anchor = len(texts[going[0]]) - 1
        alike = [row for row in going if len(texts[row]) == anchor + 1]
        sampler = Sampler([Place(rule, str(row), anchor) for row in alike], CPU)
        tokens = [tensor([texts[row][-1] for row in alike])]
        for slot in range(2):
            tokens.append(sampler.choose(drafter[tokens[-1]], slot, ALL))
        drafts = torch.stack(tokens[1:], dim=1)
        logits = torch.stack([target[token] for token in tokens], dim=1)
        verdict = sampler.judge(logits, drafts, [2] * len(alike))
        for row, draft, accepted, following in zip(alike, drafts.tolist(), *map(Tensor.tolist, verdict), strict=True):
            texts[row] += [*draft[:accepted], following]
    return tensor([text[1:3] for text in texts])


@pytest.mark.parametrize("rule", [Sampling(1.0), Sampling(0.7, top_p=0.8), Sampling(1.3, top_k=2, seed=5)])
def test_judged_drafts_have_the_law_of_the_target(rule: Sampling) -> None:
    rows = 30_000
    target, drafter = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(3)) * 1.5
    pairs = speculative_pairs(target, drafter, rule, rows)
    found = torch.bincount(pairs[:, 0] * 3 + pairs[:, 1], minlength=9) / rows
    law = distribution(target, rule)
    exact = (law[0][:, None] * law).flatten()
    # Drafts alone are far off, so the test sees a wrong acceptance or residual.
    own = distribution(drafter, rule)
    assert (own[0][:, None] * own).flatten().sub(exact).abs().sum() / 2 > 0.2
    assert found.sub(exact).abs().sum() / 2 < 0.015  # chance alone gives 0.007
    assert found[exact == 0].sum() == 0
    possible = exact > 0
    chi_square = rows * ((found - exact)[possible] ** 2 / exact[possible]).sum()
    assert chi_square < 31.8  # 0.9999 quantile at 8 degrees of freedom
