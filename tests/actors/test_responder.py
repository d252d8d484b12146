"""A responder without Ray: what it hands over when it cannot begin."""

import sys
from pathlib import Path

import pytest

from actors.responder import AnswerTask, ResponderActor, outcomes_in, task_table
from dspark.answering import PrepareSettings
from dspark.data.conversations import Conversation, Message
from dspark.decoding.sampling import Sampling
from dspark.errors import InputError
from dspark.sections import TargetSettings

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": None}}}
ASKED = Conversation(
    "c",
    (Message("user", "q"), Message("assistant", "", {"tool_calls": [CALL]}), Message("tool", "r", {"name": "f"})),
    "chat",
    3,
    tools=({"type": "function"},),
)


def task(target: Path, **prepare: str | int) -> AnswerTask:
    settings = PrepareSettings.model_validate(prepare)
    return AnswerTask(TargetSettings(model=str(target), dtype="fp32"), settings, None, Sampling(), 200)


def test_vllm_that_is_not_installed_is_told_in_words(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    actor = ResponderActor(task(tiny_target, via="vllm"))
    with pytest.raises(InputError, match=r"vLLM is not installed.*prepare\.via=endpoint"):
        outcomes_in(actor(task_table([ASKED])))


def test_a_conversation_arrives_whole_and_its_answer_comes_back_under_its_digest(tiny_target: Path) -> None:
    actor = ResponderActor(task(tiny_target, max_tokens=2))
    (outcome,) = outcomes_in(actor(task_table([ASKED])))
    assert outcome.key == ASKED.digest and outcome.failure is None
    assert [(answer.finish, answer.tokens) for answer in outcome.answers] == [("length", 2)]
