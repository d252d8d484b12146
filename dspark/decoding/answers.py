"""Answers to many conversations at once: turn after turn, the open ones together, sorted by length.

dialogues --contexts--> prompts --respond--> texts --into the dialogues--> next turn of those that have one
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from dspark.data.conversations import Conversation, Message
from dspark.data.dialogue import Answer, Dialogue, Finish
from dspark.data.ledger import Outcome
from dspark.data.render import Renderer
from dspark.decoding.engine import Engine, Request
from dspark.decoding.sampling import Sampling
from dspark.errors import InputError

# Tasks whose rows are sorted by length together.
_WINDOW_TASKS = 32


@dataclass(frozen=True)
class Asking:
    """How answers are asked for: the rendering, the sampling rule, and the longest answer and text in tokens."""

    renderer: Renderer
    sampling: Sampling
    max_tokens: int
    max_length: int

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Token ids of a context.

        Raises:
            InputError: the template refuses it, or it leaves no room for an answer.
        """
        ids = self.renderer.prompt(messages, tools)
        if not ids:
            raise InputError("the chat template prints nothing for a prompt")
        if len(ids) >= self.max_length:
            raise InputError(f"a prompt leaves no room in the target's {self.max_length} positions")
        return tuple(ids)


# Token ids of the answers with how they ended, in the order of the requests.
Respond = Callable[[Sequence[Request]], list[tuple[Sequence[int], Finish]]]


def engine_respond(engine: Engine) -> Respond:
    """Answers by the target alone, with random numbers that depend on the requests and on nothing beside them."""

    def respond(requests: Sequence[Request]) -> list[tuple[Sequence[int], Finish]]:
        return [(found.tokens, found.finish) for found in engine.generate(requests)]

    return respond


def answer_tasks(lengths: Sequence[int], task_rows: int) -> list[list[int]]:
    """Row numbers in tasks of `task_rows` rows of similar prompt lengths, the longest first.

    Rows are sorted within windows of many tasks, so that the first answers come from the first rows of a large source.
    """
    window = task_rows * _WINDOW_TASKS
    tasks: list[list[int]] = []
    for start in range(0, len(lengths), window):
        rows = sorted(range(start, min(start + window, len(lengths))), key=lambda row: (-lengths[row], row))
        tasks += [rows[at : at + task_rows] for at in range(0, len(rows), task_rows)]
    return tasks


def answer_all(
    conversations: Sequence[Conversation], asking: Asking, respond: Respond, tokenizer: PreTrainedTokenizerBase
) -> list[Outcome]:
    """One outcome per conversation, in their order; a conversation that cannot be asked costs itself alone."""
    started = time.perf_counter()
    dialogues = [Dialogue(conversation) for conversation in conversations]
    failures: dict[str, str] = {}
    while True:
        asked = []
        for dialogue in dialogues:
            key, context = dialogue.conversation.digest, dialogue.context
            if context is None or key in failures:
                continue
            try:
                prompt = asking.prompt(context, dialogue.conversation.tools)
            except InputError as error:
                failures[key] = str(error)
                continue
            asked.append((dialogue, Request(dialogue.request_id, prompt, asking.max_tokens, asking.sampling)))
        if not asked:
            break
        # Prompts of a prefill and rows of a batch share their padding, so neighbours should be alike.
        asked.sort(key=lambda pair: len(pair[1].prompt), reverse=True)
        found = respond([request for _, request in asked])
        for (dialogue, _), (tokens, finish) in zip(asked, found, strict=True):
            dialogue.take(Answer(answer_text(tokenizer, tokens, finish), finish, len(tokens)))
    spent = (time.perf_counter() - started) / max(1, len(dialogues))
    return [_outcome(dialogue, failures.get(dialogue.conversation.digest), spent) for dialogue in dialogues]


def _outcome(dialogue: Dialogue, failure: str | None, seconds: float) -> Outcome:
    answers = () if failure else tuple(dialogue.answers)
    return Outcome(dialogue.conversation.digest, answers, failure, round(seconds, 4))


def answer_text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], finish: Finish) -> str:
    """The text of an answer without the token that ended it.

    Special tokens within it stay: thinking and tool calls are marked with them in some families, and rendering the text
    again must give the same tokens.
    """
    kept = list(tokens[:-1]) if finish == "stop" else list(tokens)
    text = str(tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    # The limit may fall inside a character, whose beginning decodes to a replacement.
    return text.rstrip("\ufffd") if finish == "length" else text


def seed_of(sampling: Sampling, request_id: str) -> int:
    """The seed of a request for servers that draw by themselves, 31 bits."""
    return int.from_bytes(hashlib.sha256(f"{sampling.seed}/{request_id}".encode()).digest()[:4], "little") >> 1
