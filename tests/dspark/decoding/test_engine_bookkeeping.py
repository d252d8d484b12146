"""How the engine ends, accounts for and refuses requests."""

import time
from collections.abc import Iterator

import pytest
import torch

from dspark.decoding.engine import Engine, Generation, Request, Sampling, Seconds
from dspark.errors import InputError
from dspark.model.drafter import Drafter
from dspark.target import Target
from tests.dspark.decoding.decoders import (
    BLOCK,
    random_drafter,
    requests,
    small_vocabulary_target,
    tiny_target,
    without_cache,
)


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
                assert round.accepted <= round.proposed == round.drafted <= BLOCK
                assert len(round.confidences) == len(round.logits) == round.drafted
                assert all(0 < confidence < 1 for confidence in round.confidences)


def test_a_stream_grows_round_by_round_to_the_result_of_generate() -> None:
    target = small_vocabulary_target(6)
    engine = Engine(target, random_drafter(target, "rnn", (0, 1), 5), 2, 80)
    request = requests(target, 1, 25)[0]
    (wanted,) = engine.generate([request])
    lengths: list[int] = []
    for row in engine.stream(request):
        assert tuple(row.tokens) == wanted.tokens[: len(row.tokens)]
        assert tuple(row.rounds) == wanted.rounds[: len(lengths)]
        lengths.append(len(row.tokens))
    assert row.generation() == wanted
    assert lengths == [1 + sum(round.kept for round in wanted.rounds[:n]) for n in range(len(wanted.rounds) + 1)]


def test_a_stream_that_is_left_half_way_leaves_no_trace() -> None:
    target = small_vocabulary_target(6)
    engine = Engine(target, random_drafter(target, "rnn", (0, 1), 5), 2, 80)
    asked = requests(target, 4, 25)
    wanted = engine.generate(asked)
    stream = engine.stream(asked[3])
    for _ in range(5):
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


def test_the_drafter_holds_the_context_of_committed_tokens() -> None:
    target = small_vocabulary_target(6)
    drafter = random_drafter(target, "vanilla", (0, 1), 5)
    engine = Engine(target, drafter, 1, 80)
    assert engine.proposer is not None
    request = Request("r", (1, 2, 3), 30, Sampling(1.0))
    (result,) = engine.generate([request])
    snapshots = []
    for row in engine.stream(request):
        layers = engine.proposer.store.layers
        snapshots.append((row.anchor, [(layer.keys[0].clone(), layer.values[0].clone()) for layer in layers]))
    text = [*request.prompt, *result.tokens]
    with torch.inference_mode():
        wanted = drafter.context(target.states(torch.tensor([text]), (0, 1)).taps, torch.arange(len(text))[None])
    # Nothing is drafted after the last round, so its states are not kept. Behind a length stand rejected blocks' keys.
    for length, snapshot in snapshots[:-1]:
        for held, layer in zip(snapshot, wanted, strict=True):
            # A rejected draft's feature would differ from that of the token which took its place.
            for found, whole in zip(held, layer, strict=True):
                torch.testing.assert_close(found[:, :length], whole[0, :, :length], atol=1e-4, rtol=1e-4)
    assert len(snapshots) == 1 + len(result.rounds) and sum(result.drafted) > 3


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
    started = time.perf_counter()
    engine.generate(requests(target, 3, 20))
    wall, spent = time.perf_counter() - started, engine.seconds
    assert min(spent.prefill, spent.draft, spent.verify, spent.other) > 0
    assert spent.prefill + spent.draft + spent.verify < spent.total <= wall


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
