"""Verification policies in the engine: the target's texts and laws whatever is verified, and complete records of it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare  # type: ignore[import-untyped]

from dspark.decoding.calibration_file import Calibration, save_calibration
from dspark.decoding.engine import Engine, Generation, Request, Sampling
from dspark.decoding.policies import Fixed, Policy, Scheduled, Threshold, calibrated, choose_policy
from dspark.decoding.schedule import StepRates, confident_length, scheduled_lengths
from dspark.errors import InputError
from dspark.model.kinds import AnyDrafter
from dspark.target import Target
from tests.dspark.decoding.decoders import (
    BLOCK,
    HEADS,
    accepted,
    law_of_three_tokens,
    outcomes,
    random_drafter,
    random_eagle3,
    requests,
    small_vocabulary_target,
)

# Each token more makes a pass slower: with few requests some drafts pay, with many hardly any.
RATES = StepRates((1, 4, 8, 16), (100.0, 88.0, 60.0, 30.0))
POLICIES: list[Policy] = [Fixed(), Fixed(2), Threshold(0.5), Scheduled(RATES)]


def drafter_of(target: Target, head: str) -> AnyDrafter:
    return random_eagle3(target, (0, 1)) if head == "eagle3" else random_drafter(target, head, (0, 1), mask=2)


def varied_lengths(found: list[Generation]) -> set[int]:
    return {round.proposed for one in found for round in one.rounds if round.drafted == BLOCK}


@pytest.mark.parametrize("head", [*HEADS, "eagle3"])
def test_greedy_texts_are_plain_under_every_policy_and_batch(head: str) -> None:
    target = small_vocabulary_target(6)
    drafter, asked = drafter_of(target, head), requests(target, 5, 10)
    wanted = [one.tokens for one in Engine(target, None, 1, 80).generate(asked)]
    guessed = 0
    for policy in POLICIES[:2] if head == "eagle3" else POLICIES:
        for batch in (1, 3):
            found = Engine(target, drafter, batch, 80, policy).generate(asked)
            assert [one.tokens for one in found] == wanted, (policy, batch)
            guessed += accepted(found)
            if isinstance(policy, Threshold | Scheduled):
                assert len(varied_lengths(found)) > 1  # rows of unequal length share passes
    assert guessed > 0


@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn", "eagle3"])
def test_sampled_texts_have_the_targets_law_under_every_policy(head: str) -> None:
    target, prompt, count = small_vocabulary_target(3), (1, 2, 0), 1500
    drafter, rule = drafter_of(target, head), Sampling(temperature=1.0, top_p=0.95)
    exact = law_of_three_tokens(target, prompt, rule).double()
    possible = exact > 0
    for number, policy in enumerate(POLICIES[1:2] if head == "eagle3" else POLICIES[1:]):
        asked = [Request(f"{number}/{i}", prompt, 3, rule) for i in range(count)]
        found = Engine(target, drafter, 128, 16, policy).generate(asked)
        places = torch.tensor([9 * a + 3 * b + c for a, b, c in (one.tokens for one in found)])
        counts = torch.bincount(places, minlength=27).double()
        assert counts[~possible].sum() == 0
        wanted = exact[possible] / exact[possible].sum() * count
        assert chisquare(counts[possible].numpy(), wanted.numpy()).pvalue > 1e-3, policy
        distance = 0.5 * (counts / count - exact).abs().sum()
        # What chance alone gives on average, and by McDiarmid's inequality in all but one of 1000 samples.
        average = (exact * (1 - exact) / (2 * math.pi * count)).sqrt().sum()
        assert distance < average + math.sqrt(math.log(1000) / (2 * count)), policy


@pytest.mark.parametrize("policy", [Fixed(2), Threshold(0.5)])
def test_sampled_texts_do_not_depend_on_the_batch_where_lengths_do_not(policy: Policy) -> None:
    target = small_vocabulary_target(6)
    drafter, asked = random_drafter(target, "rnn", (0, 1), 5), requests(target, 6, 15, Sampling(1.0, top_k=5))
    alone = outcomes(Engine(target, drafter, 1, 80, policy).generate(asked))
    for batch in (2, 5):
        assert outcomes(Engine(target, drafter, batch, 80, policy).generate(asked)) == alone


def test_rounds_record_every_drafted_slot_and_what_the_policy_made_of_it() -> None:
    target = small_vocabulary_target(6)
    drafter, (request,) = random_drafter(target, "vanilla", (0, 1), 5), requests(target, 1, 40, Sampling(1.0))
    temperatures = (2.0, 0.5, 1.0, 4.0)
    for policy in POLICIES:
        (found,) = Engine(target, drafter, 1, 80, policy, temperatures).generate([request])
        assert sum(round.kept for round in found.rounds) + 1 == len(found.tokens) == 40
        for round in found.rounds:
            assert round.accepted <= round.proposed <= round.drafted == len(round.logits)
            # zip without strict: the cap leaves some rounds fewer slots than there are temperatures.
            scaled = [logit / t for logit, t in zip(round.logits, temperatures, strict=False)]
            assert round.confidences == pytest.approx([1 / (1 + math.exp(-x)) for x in scaled], abs=1e-6)
            match policy:
                case Fixed(slots):
                    assert round.proposed == round.drafted <= (slots or BLOCK)
                case Threshold(threshold):
                    assert round.proposed == confident_length(round.confidences, threshold)
                case Scheduled(rates):
                    assert [round.proposed] == scheduled_lengths([round.confidences], rates)


def test_a_confidence_without_temperatures_is_the_heads_own() -> None:
    assert calibrated(torch.zeros(1, 2), None).tolist() == [[0.5, 0.5]]
    assert calibrated(torch.tensor([[math.log(9.0), math.log(9.0)]]), (2.0, 1.0, 3.0))[0].tolist() == pytest.approx(
        [0.75, 0.9]
    )


def test_settings_name_a_policy(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    save_calibration(path, Calibration((1.5, 2.0), RATES))
    assert choose_policy("fixed", 3, None, None) == (Fixed(3), None)
    assert choose_policy("threshold", None, 0.4, path) == (Threshold(0.4), (1.5, 2.0))
    assert choose_policy("scheduled", None, None, path) == (Scheduled(RATES), (1.5, 2.0))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("threshold", None, None, None), "set a threshold between 0 and 1"),
        (("scheduled", None, None, None), "no calibration file has none: measure them"),
        (("threshold", 3, 0.5, None), "slots belongs to the policy fixed, not to threshold"),
        (("fixed", None, 0.5, None), "threshold belongs to the policy threshold, not to fixed"),
    ],
)
def test_settings_that_lack_or_contradict_something_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        choose_policy(*wrong)


def test_an_engine_refuses_a_policy_that_its_drafter_cannot_serve() -> None:
    target = small_vocabulary_target(6)
    silent, plain = random_eagle3(target, (0, 1)), random_drafter(target, "vanilla", (0, 1), 5)
    for policy in (Threshold(0.5), Scheduled(RATES)):
        with pytest.raises(InputError, match="has no confidence head"):
            Engine(target, silent, 1, 20, policy)
    with pytest.raises(InputError, match="fixed with 5 slots: the drafter has 4"):
        Engine(target, plain, 1, 20, Fixed(5))
    with pytest.raises(InputError, match=r"threshold 1\.5"):
        Engine(target, plain, 1, 20, Threshold(1.5))
    with pytest.raises(InputError, match="2 temperatures, the drafter 4 slots"):
        Engine(target, plain, 1, 20, Threshold(0.5), (1.0, 2.0))
