"""A conversation whose answers are written anew, turn by turn.

recorded messages -> context of the next answer -> the target's answer -> context of the one after it -> ... -> row

Every answer is asked for in the context that the target itself made: behind its own earlier answers, never behind the
recorded ones. That is what it meets when it serves, and what makes every answer of the row fit for the loss. The price:
a later user turn replies to an answer that its author never saw. An answer in front of a tool's result is different:
the recorded result belongs to the recorded call, so that call stays as it was, as context without loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from dspark.data.conversations import Conversation, Message

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Answer:
    """What the target wrote: its text as it stands between the generation prompt and the end of the turn."""

    text: str
    finish: Finish
    tokens: int
    parts: Mapping[str, Any] = field(default_factory=dict)  # as in `Message`, where a server took them apart


def unanswerable(messages: Sequence[Message]) -> str | None:
    """Why no answer of a conversation can be written anew; None if one can."""
    if all(message.role != "user" for message in messages):
        return "no user turn"
    for one, following in pairwise(messages):
        if one.role == following.role == "assistant":
            return "two answers follow each other"
    if not answered_turns(messages):
        return "every answer is a call to a tool whose result follows"
    return None


def answered_turns(messages: Sequence[Message]) -> list[int]:
    """Places of the answers that are written anew; the place behind the last message is an answer that is missing."""
    first_user = next((i for i, message in enumerate(messages) if message.role == "user"), len(messages))
    places = [
        i
        for i, message in enumerate(messages)
        if message.role == "assistant" and i > first_user and not _called(messages, i)
    ]
    missing = messages[-1].role in ("user", "tool") and first_user < len(messages)
    return [*places, len(messages)] if missing else places


def _called(messages: Sequence[Message], place: int) -> bool:
    return place + 1 < len(messages) and messages[place + 1].role == "tool"


class Dialogue:
    """One conversation while it is answered."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.answers: list[Answer] = []
        self._places = answered_turns(conversation.messages)
        self._messages: list[Message] = []
        self._read = 0
        self._read_on()

    @property
    def context(self) -> tuple[Message, ...] | None:
        """What the next answer is asked with; None once all are there."""
        return tuple(self._messages) if len(self.answers) < len(self._places) and self.finish == "stop" else None

    @property
    def request_id(self) -> str:
        """Name of the next answer's random numbers: the same whatever is answered beside it."""
        return f"{self.conversation.digest}/{len(self.answers)}"

    @property
    def finish(self) -> Finish:
        """`length` once an answer was cut off: nothing can follow it."""
        return self.answers[-1].finish if self.answers else "stop"

    def take(self, answer: Answer) -> None:
        """Takes the answer to `context`."""
        self._messages.append(Message("assistant", answer.text, answer.parts))
        self.answers.append(answer)
        self._read += 1
        if self.context is not None:
            self._read_on()

    def row(self) -> Conversation:
        """The conversation with the answers so far; it ends with the last of them."""
        return replace(self.conversation, messages=tuple(self._messages), finished=self.finish == "stop")

    def _read_on(self) -> None:
        """Reads the recorded messages up to the next answer; recorded answers among them are context only."""
        end = self._places[len(self.answers)]
        for message in self.conversation.messages[self._read : end]:
            self._messages.append(replace(message, supervised=False) if message.role == "assistant" else message)
        self._read = end
