"""Which answers are written anew, and in which context each is asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.data.conversations import Conversation, Message
from dspark.data.dialogue import Answer, Dialogue, answered_turns, unanswerable

LETTERS = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def conversation(roles: str) -> Conversation:
    """One message per letter of `suat`, with its place as text."""
    return Conversation("c", tuple(Message(LETTERS[role], str(i)) for i, role in enumerate(roles)), "chat", 7)


def said(messages: tuple[Message, ...] | None) -> list[str]:
    assert messages is not None
    return [message.content for message in messages]


@pytest.mark.parametrize(
    ("roles", "places"),
    [
        ("ua", [1]),
        ("u", [1]),
        ("suaua", [2, 4]),
        ("uau", [1, 3]),
        ("uata", [3]),  # the tool's result answers the recorded call, which stays
        ("uatau", [3, 5]),
        ("uatta", [4]),
        ("uat", [3]),
        ("uaua", [1, 3]),
        ("aua", [2]),  # nobody asked for the first
        ("saua", [3]),
        ("sua", [2]),
    ],
)
def test_answers_that_are_written_anew(roles: str, places: list[int]) -> None:
    assert unanswerable(conversation(roles).messages) is None
    assert answered_turns(conversation(roles).messages) == places


@pytest.mark.parametrize(
    ("roles", "reason"),
    [("sa", "no user turn"), ("uaa", "two answers follow each other"), ("uats", "every answer is a call to a tool")],
)
def test_conversations_that_nobody_can_answer(roles: str, reason: str) -> None:
    assert str(unanswerable(conversation(roles).messages)).startswith(reason)


def test_each_answer_is_asked_for_behind_the_ones_that_were_written_anew() -> None:
    dialogue = Dialogue(conversation("suaua"))
    assert said(dialogue.context) == ["0", "1"]
    first = dialogue.request_id
    dialogue.take(Answer("new one", "stop", 2))
    assert said(dialogue.context) == ["0", "1", "new one", "3"]
    assert dialogue.request_id != first
    dialogue.take(Answer("new two", "stop", 2, {"reasoning_content": "hm"}))
    assert dialogue.context is None
    row = dialogue.row()
    assert said(row.messages) == ["0", "1", "new one", "3", "new two"]
    assert row.messages[-1].parts == {"reasoning_content": "hm"}
    assert (row.id, row.domain, row.finished) == ("c", "chat", True)
    assert all(message.supervised for message in row.messages)


def test_a_recorded_call_stays_as_context_without_loss() -> None:
    dialogue = Dialogue(conversation("uatau"))
    assert said(dialogue.context) == ["0", "1", "2"]
    dialogue.take(Answer("from the result", "stop", 2))
    dialogue.take(Answer("and more", "stop", 2))
    row = dialogue.row()
    assert said(row.messages) == ["0", "1", "2", "from the result", "4", "and more"]
    assert [message.supervised for message in row.messages] == [True, False, True, True, True, True]


def test_nothing_follows_an_answer_that_was_cut_off() -> None:
    dialogue = Dialogue(conversation("uaua"))
    dialogue.take(Answer("half of", "length", 9))
    assert dialogue.context is None
    row = dialogue.row()
    assert said(row.messages) == ["0", "half of"] and not row.finished


@given(roles=st.text("suat", min_size=1, max_size=9))
def test_every_finished_row_keeps_what_was_asked_and_is_supervised_on_new_answers_alone(roles: str) -> None:
    recorded = conversation(roles)
    if unanswerable(recorded.messages) is not None:
        return
    dialogue = Dialogue(recorded)
    while dialogue.context is not None:
        assert dialogue.context[-1].role != "assistant"
        dialogue.take(Answer(f"new {len(dialogue.answers)}", "stop", 1))
    row = dialogue.row()
    new = [message.content for message in row.messages if message.role == "assistant" and message.supervised]
    assert new == [f"new {i}" for i in range(len(dialogue.answers))] != []
    places = answered_turns(recorded.messages)
    kept = [message.content for message in row.messages if message.content not in new]
    assert kept == [str(i) for i in range(min(len(roles), places[-1])) if i not in places]
