"""The sampling rule of answers, their tasks and texts, and conversations that are answered together."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.answering import PrepareSettings
from dspark.data.conversations import Conversation, Message
from dspark.data.dialogue import Finish
from dspark.data.render import Renderer
from dspark.decoding.answers import Asking, answer_all, answer_tasks, answer_text
from dspark.decoding.engine import Request
from dspark.decoding.recommended import read_recommendation, recommended_sampling
from dspark.decoding.sampling import Sampling
from dspark.errors import InputError
from tests.tiny import tiny_tokenizer

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}


@pytest.mark.parametrize(
    ("settings", "recommended", "rule"),
    [
        ({}, {}, (1.0, 0, 1.0, 0.0)),
        ({}, QWEN, (0.6, 20, 0.95, 0.0)),
        ({}, QWEN | {"min_p": 0.05, "top_k": -1}, (0.6, 0, 0.95, 0.05)),
        ({}, {"do_sample": False, "temperature": 0.6}, (0.0, 0, 1.0, 0.0)),
        ({"temperature": 0.0}, QWEN, (0.0, 20, 0.95, 0.0)),
        ({"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.1}, QWEN, (0.7, 0, 1.0, 0.1)),
        ({"temperature": 0.5}, {"do_sample": False}, (0.5, 0, 1.0, 0.0)),
    ],
)
def test_settings_come_before_the_targets_recommendation(
    settings: dict[str, Any], recommended: dict[str, Any], rule: tuple[float, int, float, float]
) -> None:
    found = recommended_sampling(PrepareSettings(**settings), recommended, seed=3)
    assert found == Sampling(rule[0], rule[1], rule[2], 3, rule[3])


def test_a_recommendation_is_read_from_the_targets_folder(tmp_path: Path) -> None:
    assert read_recommendation(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(QWEN))
    assert read_recommendation(tmp_path) == QWEN
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(InputError, match=r"generation_config\.json is not valid JSON"):
        read_recommendation(tmp_path)


@given(lengths=st.lists(st.integers(0, 50), max_size=200), task_rows=st.integers(1, 5))
def test_tasks_hold_every_row_once_by_falling_length_and_stay_within_their_window(
    lengths: list[int], task_rows: int
) -> None:
    tasks = answer_tasks(lengths, task_rows)
    rows = [row for task in tasks for row in task]
    assert sorted(rows) == list(range(len(lengths)))
    window = task_rows * 32
    assert all(row // window == place // window for place, row in enumerate(rows))
    assert all(lengths[a] >= lengths[b] for task in tasks for a, b in pairwise(task))
    assert all(len(task) == task_rows for task in tasks[:-1] if task[0] // window == tasks[-1][0] // window)


def test_the_text_of_an_answer_ends_before_its_stop_token_and_keeps_other_special_tokens() -> None:
    tokenizer = tiny_tokenizer()
    tokens = tokenizer("<|mask|>é ,<|im_end|>")["input_ids"]
    assert answer_text(tokenizer, tokens, "stop") == "<|mask|>é ,"
    half = tokenizer("aé")["input_ids"][:-1]
    assert answer_text(tokenizer, half, "length") == "a"


def test_open_conversations_are_asked_together_and_a_bad_one_costs_itself() -> None:
    calls: list[list[int]] = []
    tokenizer = tiny_tokenizer()

    def respond(requests: Sequence[Request]) -> list[tuple[Sequence[int], Finish]]:
        calls.append([len(request.prompt) for request in requests])
        assert len({request.id for request in requests}) == len(requests)
        return [(tokenizer(f"{len(request.prompt)}<|im_end|>")["input_ids"], "stop") for request in requests]

    def row(*contents: str) -> Conversation:
        roles = ("user", "assistant", "user")
        return Conversation("c", tuple(Message(*pair) for pair in zip(roles, contents, strict=False)), None, 1)

    rows = [row("one"), row("longer", "recorded", "more"), row("too long" * 30), row("mid")]
    asking = Asking(Renderer(tokenizer, 512, None), Sampling(), max_tokens=9, max_length=100)
    outcomes = answer_all(rows, asking, respond, tokenizer)
    plain = len(asking.prompt(rows[0].messages, ()))
    assert calls[0] == [plain + 3, plain, plain] and len(calls) == 2 and len(calls[1]) == 1
    assert [outcome.key for outcome in outcomes] == [one.digest for one in rows]
    assert [answer.text for answer in outcomes[1].answers] == [str(calls[0][0]), str(calls[1][0])]
    assert (outcomes[2].answers, outcomes[2].failure) == ((), "a prompt leaves no room in the target's 100 positions")
    assert outcomes[3].failure is None
