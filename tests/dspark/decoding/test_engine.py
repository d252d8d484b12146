"""What the engine decodes: the target's own texts, whatever drafter, batch and sampling."""

from typing import Any

import numpy as np
import pytest
import torch

from dspark.decoding import engine as engine_module
from dspark.decoding.engine import Engine, Request, Sampling
from dspark.training.batch import Batch
from dspark.training.blocks import make_blocks
from dspark.training.objective import draft_logits, run_drafter
from tests.dspark.decoding.decoders import (
    BLOCK,
    HEADS,
    Recorder,
    accepted,
    law_of_three_tokens,
    outcomes,
    random_drafter,
    requests,
    small_vocabulary_target,
    tiny_target,
    trained_drafter,
    without_cache,
)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma4_text", "gemma4_unified"])
def test_plain_decoding_equals_transformers_own_generation(family: str) -> None:
    target = tiny_target(family)
    for request in requests(target, 3, 12):
        model: Any = target.model
        prompt = torch.tensor([request.prompt])
        wanted = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.max_new_tokens, do_sample=False
        )
        (found,) = Engine(target, None, 1, 64).generate([request])
        assert [*request.prompt, *found.tokens] == wanted[0].tolist()
        assert not any(found.drafted) and {round.kept for round in found.rounds} == {1}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma4_text", "gemma4_unified"])
def test_greedy_texts_are_those_of_a_loop_without_caches_for_every_head_and_batch(family: str) -> None:
    target = tiny_target(family)
    asked = requests(target, 5, 8)
    wanted = [without_cache(target, request) for request in asked]
    for batch, head in [
        (1, "plain"),
        (3, "plain"),
        (1, "vanilla"),
        (3, "none"),
        (3, "vanilla"),
        (3, "gated"),
        (3, "rnn"),
    ]:
        drafter = None if head == "plain" else random_drafter(target, head)
        found = Engine(target, drafter, batch, 64).generate(asked)
        assert [one.tokens for one in found] == wanted, (batch, head)
        assert [one.id for one in found] == [request.id for request in asked]


@pytest.mark.parametrize("head", HEADS)
def test_greedy_texts_stay_plain_where_chance_accepts_many_drafts(head: str) -> None:
    target = small_vocabulary_target(6)
    asked = requests(target, 7, 14)
    wanted = [one.tokens for one in Engine(target, None, 1, 80).generate(asked)]
    assert wanted[-1] == without_cache(target, asked[-1])
    for batch in (1, 3):
        found = Engine(target, random_drafter(target, head, (0, 1), 5), batch, 80).generate(asked)
        assert [one.tokens for one in found] == wanted
        assert accepted(found) > 5


def test_a_trained_drafter_is_faster_and_changes_no_token() -> None:
    target = tiny_target()
    asked = requests(target, 4, 40)
    found = Engine(target, trained_drafter(), 3, 100).generate(asked)
    assert [one.tokens for one in found] == [one.tokens for one in Engine(target, None, 2, 100).generate(asked)]
    rounds = sum(len(one.rounds) for one in found)
    assert accepted(found) > rounds  # more than one draft of four in every round


@pytest.mark.parametrize(("head", "family"), [*((head, "llama") for head in HEADS), ("vanilla", "gemma4_text")])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
def test_the_engine_drafts_what_the_training_pass_computes_from_the_same_tokens(
    head: str, family: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, taps = small_vocabulary_target(6, family), (0, 1)
    drafter = random_drafter(target, head, taps, 5)
    monkeypatch.setattr(engine_module, "Sampler", Recorder)
    monkeypatch.setattr(Recorder, "rounds", [])
    request = Request("a", (1, 4, 2, 0, 3), 70, sampling)
    (generation,) = Engine(target, drafter, 1, 100).generate([request])
    drafted = (block for block in Recorder.rounds if block)
    text, compared = [*request.prompt, generation.tokens[0]], 0
    for round in generation.rounds:
        block = next(drafted) if round.proposed else []
        if not block:
            text.append(generation.tokens[-1])  # the cap leaves room for the target's token only
            continue
        drafts = [int(tokens) for _, tokens in block]
        ids = torch.tensor([[*text, *drafts]])
        # States of the drafts are computed too, but no block may look at or behind its anchor.
        batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), *target.states(ids, taps))
        blocks = make_blocks(ids, batch.loss_mask_BS, [np.array([len(text) - 1])], BLOCK, gamma=None)
        with torch.inference_mode():
            vocabulary = target.vocabulary.narrowed(drafter.kept)
            output = run_drafter(drafter, vocabulary, batch, blocks)
            slots = torch.arange(BLOCK)[None, None] < len(drafts)
            wanted = draft_logits(drafter, vocabulary, output, slots)
        torch.testing.assert_close(torch.cat([logits for logits, _ in block]), wanted, atol=1e-4, rtol=0)
        assert output.confidence_BAK is not None
        assert round.confidences == pytest.approx(output.confidence_BAK[slots].sigmoid().tolist(), abs=1e-4)
        done = len(text) - len(request.prompt)
        text += generation.tokens[done : done + round.kept]
        compared += 1
    assert text == [*request.prompt, *generation.tokens]
    assert compared >= 20 and accepted([generation]) > 0


@pytest.mark.parametrize(
    ("head", "rule"),
    [
        ("none", Sampling(1.0)),
        ("vanilla", Sampling(1.3, top_p=0.9)),
        ("gated", Sampling(1.5, top_k=2)),
        ("rnn", Sampling(1.0)),
        ("reduced", Sampling(1.2)),
        ("reduced", Sampling(1.5, top_k=2)),
    ],
)
def test_sampled_texts_have_the_exact_law_of_the_target(head: str, rule: Sampling) -> None:
    """Three tokens of three kinds; the first comes from the prefill, the others from rounds with four drafts."""
    target, seeds, prompt = small_vocabulary_target(3), 3000, (2, 0, 1)
    asked = [Request("r", prompt, 6, Sampling(rule.temperature, rule.top_k, rule.top_p, seed)) for seed in range(seeds)]
    found = Engine(target, random_drafter(target, head, (0, 1), 1), 1000, 16).generate(asked)
    places = torch.tensor([one.tokens[:3] for one in found]) @ torch.tensor([9, 3, 1])
    observed = torch.bincount(places, minlength=27) / seeds
    exact = law_of_three_tokens(target, prompt, rule)
    assert observed.sub(exact).abs().sum() / 2 < 0.055  # sampling alone gives 0.03
    assert observed[exact == 0].sum() == 0
    # Every branch was at work: drafts accepted, drafts replaced, bonus tokens.
    firsts = [one.rounds[0] for one in found]
    assert {round.proposed for round in firsts} == {4}
    assert {round.accepted for round in firsts} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("head", ["none", "rnn"])
def test_sampled_texts_depend_on_seed_and_id_but_not_on_the_batch(head: str) -> None:
    target = small_vocabulary_target(6)
    drafter = random_drafter(target, head, (0, 1), 5)
    asked = requests(target, 6, 14, Sampling(1.0, seed=3))
    alone = Engine(target, drafter, 1, 80).generate(asked)
    assert outcomes(Engine(target, drafter, 4, 80).generate(asked)) == outcomes(alone)
    assert outcomes(Engine(target, drafter, 4, 80).generate(asked[::-1])[::-1]) == outcomes(alone)
    plain = Engine(target, None, 1, 80).generate(asked)
    assert Engine(target, None, 4, 80).generate(asked) == plain

    prompt = asked[0].prompt
    others = [Request("request 0", prompt, 20, Sampling(1.0, seed=4)), Request("x", prompt, 20, Sampling(1.0, seed=3))]
    texts = {one.tokens for one in [alone[0], *Engine(target, drafter, 2, 80).generate(others)]}
    assert len(texts) == 3


def test_requests_of_different_rules_share_a_batch() -> None:
    target = small_vocabulary_target(6)
    drafter = random_drafter(target, "vanilla", (0, 1), 5)
    rules = [Sampling(), Sampling(1.0), Sampling(0.7, top_k=3), Sampling(1.0, top_p=0.9, seed=1), Sampling()]
    asked = [Request(str(number), (1, 2, 3), 20, rule) for number, rule in enumerate(rules)]
    together = Engine(target, drafter, 5, 40).generate(asked)
    apart = [Engine(target, drafter, 1, 40).generate([request])[0] for request in asked]
    assert outcomes(together) == outcomes(apart)
