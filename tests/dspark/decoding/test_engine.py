"""The engine against transformers, against a loop without caches, and against the training-time drafter."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.config import DrafterSettings, LossSettings, TargetSettings
from dspark.decoding import engine as engine_module
from dspark.decoding.engine import Engine, Generation, Request, Sampling, Seconds
from dspark.decoding.sampling import Place, Sampler, distribution
from dspark.errors import InputError
from dspark.model.config import draft_config
from dspark.model.drafter import Drafter, new_drafter
from dspark.target import Target, load_target
from dspark.training.batch import Batch
from dspark.training.blocks import make_blocks
from dspark.training.objective import DraftObjective, draft_logits, run_drafter, step_weight
from tests.tiny import MASK_ID, tiny_target_folder, tiny_tokenizer

HEADS = ["none", "vanilla", "gated", "rnn"]
TAPS = (0, 2, 4)
BLOCK = 4


@cache
def tiny_target(family: str = "llama") -> Target:
    with TemporaryDirectory() as folder:
        return load_target(TargetSettings(model=str(tiny_target_folder(Path(folder), family)), dtype="fp32"))


@cache
def small_vocabulary_target(tokens: int) -> Target:
    """Two layers and a few tokens: chance alone accepts many drafts, and laws can be written out."""
    sizes: dict[str, Any] = {
        "vocab_size": tokens, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "initializer_range": 0.4,
        "pad_token_id": None, "eos_token_id": None, "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    return Target(model, tiny_tokenizer(), "small", "local", "none")


def random_drafter(target: Target, head: str, taps: tuple[int, ...] = TAPS, mask: int = MASK_ID) -> Drafter:
    """Untrained, with a Markov bias and confidences that are not all alike."""
    kind: Any = "vanilla" if head == "none" else head
    settings = DrafterSettings(
        layers=2, block=BLOCK, taps=taps, mask_token_id=mask, markov_rank=0 if head == "none" else 8,
        markov_head=kind, confidence_with_markov=head != "none",
    )  # fmt: skip
    drafter = new_drafter(draft_config(target.config, settings), seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(std=1.5 if "markov_w2" in name else 0.3, generator=generator)
    return drafter.eval()


def requests(target: Target, count: int, new: int, sampling: Sampling | None = None) -> list[Request]:
    """Prompts of 1, 4, 7, ... tokens."""
    generator = torch.Generator().manual_seed(3)
    high = min(target.vocab_size, 256)
    return [
        Request(
            f"request {number}",
            tuple(torch.randint(high, (1 + 3 * number,), generator=generator).tolist()),
            new + number,
            sampling or Sampling(),
        )
        for number in range(count)
    ]


@torch.inference_mode()
def without_cache(target: Target, request: Request) -> tuple[int, ...]:
    """Greedy decoding that computes everything anew for every token."""
    ids = list(request.prompt)
    for _ in range(request.max_new_tokens):
        final = target.states(torch.tensor([ids]), ()).final
        ids.append(int(target.vocabulary.logits(final[0, -1]).argmax()))
        if ids[-1] in target.stop_ids:
            break
    return tuple(ids[len(request.prompt) :])


def text_batch(target: Target, ids: Sequence[int]) -> Batch:
    ids_BS = torch.tensor([list(ids)])
    states = target.states(ids_BS, TAPS)
    return Batch(ids_BS, torch.ones_like(ids_BS, dtype=torch.bool), states.taps.clone(), states.final.clone())


@cache
def trained_drafter() -> Drafter:
    """Trained for 60 steps on the target's own greedy texts, long enough to guess many of their tokens."""
    target = tiny_target()
    drafter = random_drafter(target, "vanilla").train()
    texts = [
        text_batch(target, [*request.prompt, *generation.tokens])
        for request, generation in zip(
            requests(target, 4, 40), Engine(target, None, 4, 100).generate(requests(target, 4, 40)), strict=True
        )
    ]
    objective = DraftObjective(drafter, LossSettings(ce=1.0, l1=0.0))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for step in range(60):
        batch = texts[step % len(texts)]
        anchors = [np.arange(batch.input_ids_BS.shape[1] - 1)]
        blocks = make_blocks(batch.input_ids_BS, batch.loss_mask_BS, anchors, BLOCK, gamma=None)
        objective(target.vocabulary, batch, blocks, step_weight(blocks)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval()


def accepted(generations: Sequence[Generation]) -> int:
    return sum(round.accepted for generation in generations for round in generation.rounds)


def outcomes(generations: Sequence[Generation]) -> list[Any]:
    """Everything but the confidences, which a batch changes by rounding."""
    return [
        (one.tokens, one.drafted, [(round.proposed, round.accepted, round.kept) for round in one.rounds])
        for one in generations
    ]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
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


@pytest.mark.parametrize("family", ["llama", "qwen3"])
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


class Recorder(Sampler):
    """A sampler that remembers every block's logits and drafts."""

    blocks: ClassVar[list[list[tuple[Tensor, Tensor]]]] = []

    def __init__(self, places: Sequence[Place], device: torch.device) -> None:
        super().__init__(places, device)
        self.blocks.append([])

    def choose(self, logits_RV: Tensor, slot: int) -> Tensor:
        tokens_R = super().choose(logits_RV, slot)
        self.blocks[-1].append((logits_RV.clone(), tokens_R))
        return tokens_R


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
def test_the_engine_drafts_what_the_training_pass_computes_from_the_same_tokens(
    head: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, taps = small_vocabulary_target(6), (0, 1)
    drafter = random_drafter(target, head, taps, 5)
    monkeypatch.setattr(engine_module, "Sampler", Recorder)
    monkeypatch.setattr(Recorder, "blocks", [])
    request = Request("a", (1, 4, 2, 0, 3), 70, sampling)
    (generation,) = Engine(target, drafter, 1, 100).generate([request])
    drafted = (block for block in Recorder.blocks if block)
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
            output = run_drafter(drafter, target.vocabulary, batch, blocks)
            slots = torch.arange(BLOCK)[None, None] < len(drafts)
            wanted = draft_logits(drafter, target.vocabulary, output, slots)
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
    ],
)
def test_sampled_texts_have_the_exact_law_of_the_target(head: str, rule: Sampling) -> None:
    """Three tokens of three kinds; the first comes from the prefill, the others from rounds with four drafts."""
    target, seeds, prompt = small_vocabulary_target(3), 3000, (2, 0, 1)
    asked = [Request("r", prompt, 6, Sampling(rule.temperature, rule.top_k, rule.top_p, seed)) for seed in range(seeds)]
    found = Engine(target, random_drafter(target, head, (0, 1), 1), 1000, 16).generate(asked)
    places = torch.tensor([one.tokens[:3] for one in found]) @ torch.tensor([9, 3, 1])
    observed = torch.bincount(places, minlength=27) / seeds

    with torch.inference_mode():
        texts = torch.cartesian_prod(torch.arange(3), torch.arange(3))
        final = target.states(torch.cat((torch.tensor(prompt).expand(9, 3), texts), dim=1), ()).final
        law_93V = distribution(target.vocabulary.logits(final[:, 2:]), rule)
    first, second, third = law_93V[0, 0], law_93V[::3, 1], law_93V[:, 2]
    exact = (first[:, None, None] * second[:, :, None] * third.view(3, 3, 3)).flatten()
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


@pytest.fixture
def stopping() -> Iterator[Target]:
    target = small_vocabulary_target(6)
    before = target.stop_ids
    yield target
    target.stop_ids = before


def first_uses(generation: Generation) -> dict[int, int]:
    """Where each token stands first."""
    return {token: generation.tokens.index(token) for token in generation.tokens}


def test_a_stop_id_ends_the_text_whoever_proposed_it(stopping: Target) -> None:
    drafter = random_drafter(stopping, "vanilla", (0, 1), 5)
    whoever, inside = set(), 0
    for seed in range(3):
        request = Request("r", (1, 2), 40, Sampling(1.0, seed=seed))
        (endless,) = Engine(stopping, drafter, 1, 64).generate([request])
        for token, place in first_uses(endless).items():
            stopping.stop_ids = frozenset({token, 100})
            (found,) = Engine(stopping, drafter, 1, 64).generate([request])
            assert found.tokens == endless.tokens[: place + 1] and found.finish == "stop"
            whoever.add(found.drafted[-1])
            if found.rounds and found.rounds[-1].kept <= found.rounds[-1].accepted:
                assert found.drafted[-1]
                inside += 1
        stopping.stop_ids = frozenset()
    assert whoever == {False, True} and inside > 0


@pytest.mark.parametrize("cap", range(1, 14))
def test_a_cap_ends_the_text_wherever_it_falls_in_a_block(cap: int) -> None:
    target = small_vocabulary_target(6)
    drafter = random_drafter(target, "vanilla", (0, 1), 5)
    asked = Request("r", (1, 2, 3), 40, Sampling())
    (whole,) = Engine(target, drafter, 1, 64).generate([asked])
    (by_request,) = Engine(target, drafter, 1, 64).generate([Request("r", (1, 2, 3), cap, Sampling())])
    (by_length,) = Engine(target, drafter, 1, 3 + cap).generate([asked])
    assert by_request.tokens == by_length.tokens == whole.tokens[:cap]
    assert by_request.finish == by_length.finish == "length"
    done = 1
    for round in by_request.rounds:
        # Drafts that the cap would cut are not offered.
        assert round.proposed == min(BLOCK, cap - done - 1)
        done += round.kept


def test_a_stop_id_at_the_cap_counts_as_stop(stopping: Target) -> None:
    drafter = random_drafter(stopping, "vanilla", (0, 1), 5)
    (whole,) = Engine(stopping, drafter, 1, 64).generate([Request("r", (1, 2, 3), 20, Sampling(1.0))])
    token, place = max(first_uses(whole).items(), key=lambda use: use[1])
    stopping.stop_ids = frozenset({token})
    (found,) = Engine(stopping, drafter, 1, 64).generate([Request("r", (1, 2, 3), place + 1, Sampling(1.0))])
    assert found.tokens == whole.tokens[: place + 1] and found.finish == "stop"


def test_rounds_account_for_every_token_but_the_first() -> None:
    target = small_vocabulary_target(6)
    for drafter in (None, random_drafter(target, "gated", (0, 1), 5)):
        for found in Engine(target, drafter, 3, 80).generate(requests(target, 8, 1, Sampling(1.0))):
            assert sum(round.kept for round in found.rounds) + 1 == len(found.tokens) == len(found.drafted)
            assert sum(round.accepted for round in found.rounds) == sum(found.drafted)  # no stop id cuts any off
            flags = [flag for round in found.rounds for flag in [*[True] * round.accepted, False]]
            assert [False, *flags] == list(found.drafted)
            for round in found.rounds:
                assert round.accepted <= round.proposed <= BLOCK
                assert len(round.confidences) == round.proposed
                assert all(0 < confidence < 1 for confidence in round.confidences)


def test_a_stream_gives_the_tokens_of_generate_and_returns_its_result() -> None:
    target = small_vocabulary_target(6)
    engine = Engine(target, random_drafter(target, "rnn", (0, 1), 5), 2, 80)
    request = requests(target, 1, 25)[0]
    (wanted,) = engine.generate([request])
    stream, tokens = engine.stream(request), []
    while True:
        try:
            tokens.append(next(stream))
        except StopIteration as end:
            result = end.value
            break
    assert tokens == list(zip(wanted.tokens, wanted.drafted, strict=True)) and result == wanted


def test_a_stream_that_is_left_half_way_leaves_no_trace() -> None:
    target = small_vocabulary_target(6)
    engine = Engine(target, random_drafter(target, "rnn", (0, 1), 5), 2, 80)
    asked = requests(target, 4, 25)
    wanted = engine.generate(asked)
    stream = engine.stream(asked[3])
    for _ in range(9):
        next(stream)
    with pytest.raises(AssertionError, match="one call at a time"):
        engine.generate(asked)
    stream.close()
    assert engine.generate(asked) == wanted


def test_the_stores_are_allocated_once_for_a_call_and_reused_by_the_next() -> None:
    target = small_vocabulary_target(6)
    engine = Engine(target, random_drafter(target, "vanilla", (0, 1), 5), 2, 200)
    assert engine.proposer is not None
    stores = (engine.store, engine.proposer.store)

    def addresses() -> list[int]:
        return [tensor.data_ptr() for store in stores for layer in store.layers for tensor in layer]

    engine.generate(requests(target, 3, 20))
    assert [store.width for store in stores] == [64, 64]  # not the 200 that the engine may hold
    before = addresses()
    stream = engine.stream(requests(target, 1, 50)[0])
    assert all(addresses() == before for _ in stream)
    engine.generate(requests(target, 1, 150))
    assert [store.width for store in stores] == [192, 192]


def test_the_drafter_holds_context_of_committed_tokens_below_the_anchor_only() -> None:
    target = small_vocabulary_target(6)
    drafter = random_drafter(target, "vanilla", (0, 1), 5)
    engine = Engine(target, drafter, 1, 80)
    assert engine.proposer is not None
    text, snapshots = [1, 2, 3], []
    for token, _ in engine.stream(Request("r", tuple(text), 30, Sampling(1.0))):
        layers = engine.proposer.store.layers
        text.append(token)
        snapshots.append([(layer.keys[0].clone(), layer.values[0].clone()) for layer in layers])
    with torch.inference_mode():
        wanted = drafter.context(target.states(torch.tensor([text]), (0, 1)).taps, torch.arange(len(text))[None])
    lengths = set()
    for snapshot in snapshots:
        for held, layer in zip(snapshot, wanted, strict=True):
            written = held[0].count_nonzero(dim=(0, 2)).bool()
            length = int(written.sum())
            lengths.add(length)
            assert written.tolist() == [True] * length + [False] * (64 - length)
            # A rejected draft's feature would differ from that of the token which took its place.
            for found, whole in zip(held, layer, strict=True):
                torch.testing.assert_close(found[:, :length], whole[0, :, :length], atol=1e-4, rtol=1e-4)
    assert min(lengths) == 3 and max(lengths) >= 26 and len(lengths) > 10


def test_drafting_ends_where_the_drafters_positions_end() -> None:
    target = small_vocabulary_target(6)
    drafter = random_drafter(target, "vanilla", (0, 1), 5)
    short = Drafter(type(drafter.config)(**{**vars(drafter.config), "max_positions": 20}))
    short.load_state_dict(drafter.state_dict())
    request = Request("r", (1, 2, 3), 40, Sampling())
    (found,) = Engine(target, short, 1, 64).generate([request])
    assert found.tokens == without_cache(target, request)
    position = 3
    for round in found.rounds:
        assert (round.proposed > 0) == (position + BLOCK <= 20 and position < 41)
        position += round.kept


def test_seconds_add_up() -> None:
    target = small_vocabulary_target(6)
    engine = Engine(target, random_drafter(target, "vanilla", (0, 1), 5), 2, 80)
    assert engine.seconds == Seconds()
    engine.generate(requests(target, 3, 20))
    spent = engine.seconds
    assert min(spent.prefill, spent.draft, spent.verify, spent.other) > 0
    assert spent.prefill + spent.draft + spent.verify + spent.other == pytest.approx(spent.total)


def test_no_request_gives_no_result() -> None:
    assert Engine(tiny_target(), None, 2, 10).generate([]) == []


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ((), 5, "prompt of 0 tokens"),
        (tuple(range(10)), 5, "prompt of 10 tokens, and the engine holds 10"),
        ((1, 2), 0, "asks for 0 new tokens"),
        ((1, 320), 5, "outside 0..319"),
        ((1, -1), 5, "outside 0..319"),
    ],
)
def test_requests_that_cannot_be_decoded_are_refused(prompt: tuple[int, ...], new: int, message: str) -> None:
    engine = Engine(tiny_target(), None, 2, 10)
    with pytest.raises(InputError, match=message):
        engine.generate([Request("r", prompt, new, Sampling())])
    assert len(engine.generate([Request("r", (1, 2), 3, Sampling())])) == 1  # the engine is free again


def test_an_engine_refuses_what_its_target_cannot_serve() -> None:
    target, other = tiny_target(), small_vocabulary_target(6)
    with pytest.raises(InputError, match="max_length=513 is beyond the target's 512 positions"):
        Engine(target, None, 1, 513)
    with pytest.raises(InputError, match="at least 1 row"):
        Engine(target, None, 0, 20)
    with pytest.raises(InputError, match="vocabulary is 6, the target's is 320"):
        Engine(target, random_drafter(other, "none", (0, 1), 5), 1, 20)
    with pytest.raises(InputError, match=r"dtype is torch\.bfloat16, the target's is torch\.float32"):
        Engine(target, random_drafter(target, "none").bfloat16(), 1, 20)
