"""Decoding with an EAGLE-3 drafter: the target's own texts, from drafts that training would have computed."""

import numpy as np
import pytest
import torch

from dspark.decoding import engine as engine_module
from dspark.decoding.chains import ChainProposer
from dspark.decoding.engine import Engine, Request, Sampling
from dspark.learning import Eagle3Settings
from dspark.training.batch import Batch
from dspark.training.chains import make_chains
from dspark.training.eagle3 import run_chains
from tests.dspark.decoding.decoders import (
    BLOCK,
    Recorder,
    accepted,
    law_of_three_tokens,
    outcomes,
    random_eagle3,
    requests,
    small_vocabulary_target,
    tiny_target,
    trained_eagle3,
    without_cache,
)


@pytest.mark.parametrize(
    ("family", "form"),
    [("llama", None), ("llama", "llama"), ("qwen3", None), ("gemma4_unified", None)],
)
def test_greedy_texts_are_those_of_a_loop_without_caches_for_every_batch(family: str, form: str | None) -> None:
    target = tiny_target(family)
    asked = requests(target, 5, 8)
    wanted = [without_cache(target, request) for request in asked]
    for batch in (1, 3):
        found = Engine(target, random_eagle3(target, family=form), batch, 64).generate(asked)
        assert [one.tokens for one in found] == wanted
        assert {round.confidences for one in found for round in one.rounds} == {()}


@pytest.mark.parametrize(("family", "reduced"), [("llama", False), ("llama", True), ("gemma4_text", True)])
def test_greedy_texts_stay_plain_where_chance_accepts_many_drafts(family: str, reduced: bool) -> None:
    target = small_vocabulary_target(6, family)
    asked = requests(target, 7, 14)
    wanted = [one.tokens for one in Engine(target, None, 1, 80).generate(asked)]
    for batch in (1, 3):
        found = Engine(target, random_eagle3(target, (0, 1), reduced), batch, 80).generate(asked)
        assert [one.tokens for one in found] == wanted
        assert accepted(found) > 5


def test_a_trained_drafter_is_faster_and_changes_no_token() -> None:
    target = tiny_target()
    asked = requests(target, 4, 40)
    found = Engine(target, trained_eagle3(), 3, 100).generate(asked)
    assert [one.tokens for one in found] == [one.tokens for one in Engine(target, None, 2, 100).generate(asked)]
    assert accepted(found) > sum(len(one.rounds) for one in found) / 2


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
def test_the_engine_drafts_what_the_training_pass_computes_from_the_same_tokens(
    reduced: bool, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, taps = small_vocabulary_target(6), (0, 1)
    drafter = random_eagle3(target, taps, reduced)
    vocabulary = target.vocabulary.narrowed(drafter.kept)
    monkeypatch.setattr(engine_module, "Sampler", Recorder)
    monkeypatch.setattr(Recorder, "rounds", [])
    request = Request("a", (1, 4, 2, 0, 3), 70, sampling)
    (generation,) = Engine(target, drafter, 1, 100).generate([request])
    drafted = (drafts for drafts in Recorder.rounds if drafts)
    text, compared = [*request.prompt, generation.tokens[0]], 0
    for round in generation.rounds:
        drafts = next(drafted) if round.proposed else []
        if drafts:
            ids = torch.tensor([[*text, *(int(tokens) for _, tokens in drafts)]])
            # States of the drafts are computed too, but no step may look at or behind its anchor.
            batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), *target.states(ids, taps))
            chains = make_chains(
                batch, [np.array([len(text) - 1])], [ids.shape[1]], Eagle3Settings(ttt_length=len(drafts))
            )
            with torch.inference_mode():
                wanted = vocabulary.draft_logits(run_chains(drafter, vocabulary, batch, chains)[0, 0])
            torch.testing.assert_close(torch.cat([logits for logits, _ in drafts]), wanted, atol=1e-4, rtol=0)
            compared += 1
        done = len(text) - len(request.prompt)
        text += generation.tokens[done : done + round.kept]
    assert text == [*request.prompt, *generation.tokens]
    assert compared >= 20 and accepted([generation]) > 0


def test_sampled_texts_have_the_exact_law_of_the_target() -> None:
    """Three tokens of three kinds; the first comes from the prefill, the others from rounds with four drafts."""
    target, seeds, prompt, rule = small_vocabulary_target(3), 2000, (2, 0, 1), Sampling(1.5, top_k=2)
    asked = [Request("r", prompt, 6, Sampling(rule.temperature, rule.top_k, rule.top_p, seed)) for seed in range(seeds)]
    found = Engine(target, random_eagle3(target, (0, 1)), 1000, 16).generate(asked)
    places = torch.tensor([one.tokens[:3] for one in found]) @ torch.tensor([9, 3, 1])
    observed = torch.bincount(places, minlength=27) / seeds
    exact = law_of_three_tokens(target, prompt, rule)
    assert observed.sub(exact).abs().sum() / 2 < 0.055  # sampling alone gives 0.02
    assert observed[exact == 0].sum() == 0
    assert {one.rounds[0].accepted for one in found} == {0, 1, 2, 3, 4}


def test_sampled_texts_depend_on_seed_and_id_but_not_on_the_batch() -> None:
    target = small_vocabulary_target(6)
    drafter = random_eagle3(target, (0, 1))
    asked = requests(target, 6, 14, Sampling(1.0, seed=3))
    alone = Engine(target, drafter, 1, 80).generate(asked)
    assert outcomes(Engine(target, drafter, 4, 80).generate(asked)) == outcomes(alone)
    assert outcomes(Engine(target, drafter, 4, 80).generate(asked[::-1])[::-1]) == outcomes(alone)


def test_rows_of_committed_tokens_replace_those_of_their_drafts() -> None:
    target = small_vocabulary_target(6)
    drafter = random_eagle3(target, (0, 1))
    engine = Engine(target, drafter, 1, 80)
    assert isinstance(engine.proposer, ChainProposer)
    snapshots = []
    for row in engine.stream(Request("r", (1, 2, 3), 30, Sampling(1.0))):
        text = row.text(0, row.anchor + 1)
        held, last = engine.proposer.store.layers[0], engine.proposer.last_RH
        snapshots.append((held.keys[0].clone(), held.values[0].clone(), last[0].clone()))
    ids = torch.tensor([text])
    with torch.inference_mode():
        features = drafter.features(target.states(ids, (0, 1)).taps)
        joined = drafter.join(features[:, :-1], target.vocabulary.embed(ids[:, 1:]))
        wanted = drafter.key_values(joined, torch.arange(len(text) - 1)[None])
    lengths = []
    for keys, values, last in snapshots:
        # The last feature says up to which position the drafter was told.
        length = 1 + int((features[0] - last).abs().sum(-1).argmin())
        torch.testing.assert_close(last, features[0, length - 1], atol=1e-4, rtol=1e-4)
        for found, whole in zip((keys, values), wanted, strict=True):
            torch.testing.assert_close(found[:, :length], whole[0, :, :length], atol=1e-4, rtol=1e-4)
        lengths.append(length)
    assert lengths == sorted(lengths) and lengths[0] == 3 and lengths[-1] >= 26


@pytest.mark.parametrize("cap", range(1, 8))
def test_a_cap_ends_the_text_wherever_it_falls_in_a_round(cap: int) -> None:
    target = small_vocabulary_target(6)
    drafter = random_eagle3(target, (0, 1))
    (whole,) = Engine(target, drafter, 1, 64).generate([Request("r", (1, 2, 3), 20, Sampling())])
    (found,) = Engine(target, drafter, 1, 64).generate([Request("r", (1, 2, 3), cap, Sampling())])
    assert found.tokens == whole.tokens[:cap] and found.finish == "length"
    done = 1
    for round in found.rounds:
        assert round.proposed == min(BLOCK, cap - done - 1)
        done += round.kept
