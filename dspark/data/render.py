"""Token rows from conversations: the target's chat template decides the text, message prefixes decide the loss mask.

Conversation -> template -> text -> tokens with character offsets -> Sample or Dropped
Supervised is what the target itself would write: from the end of the generation prompt to the end-of-turn token.
The spans come from rendering prefixes of the messages, never from searching the text: a user may type any header.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dspark.data.conversations import DUPLICATE, Conversation, Conversations, Dropped, Message, reasons, refuse_bad_rows
from dspark.errors import InputError

if TYPE_CHECKING:  # `Sample` stands in the data contract: a process that only reads captured rows needs no transformers
    from transformers import PreTrainedTokenizerBase

# Part of the settings hash: raise it whenever the same row would get another text or another mask.
MASK_RULE = 3


@dataclass(frozen=True, eq=False)  # the id says what is equal; arrays have no truth value
class Sample:
    """One training row of S tokens."""

    sample_id: str  # hash of ids and mask
    conversation_id: str
    domain: str | None
    input_ids: NDArray[np.int32]  # [S]
    loss_mask: NDArray[np.uint8]  # [S], 1: supervised


@dataclass(frozen=True)
class Rendered:
    """Samples in the order of their conversations, and the conversations that gave none."""

    samples: tuple[Sample, ...]
    dropped: tuple[Dropped, ...]


class _Refused(Exception):
    """The chat template raised; the message is groupable."""


class Renderer:
    """One tokenizer, one template, one set of flags: every job that needs tokens of a conversation uses this.

    `thinking` is passed to the template as `enable_thinking`; None passes nothing. `settings_hash` names all that
    decides ids and mask, `facts` what went into it. Raises InputError for a slow tokenizer or one without a template.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", max_length: int, thinking: bool | None) -> None:
        if not tokenizer.is_fast:
            raise InputError(
                f"{type(tokenizer).__name__} gives no character offsets, which the loss mask needs: use a target with "
                "a fast tokenizer (tokenizer.json)"
            )
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            raise InputError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template: use a chat model as target, or save "
                "chat_template.jinja beside its tokenizer"
            ) from error
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._flags: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        added = {token.content for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
        ends = sorted(token for token in added if token.strip())  # some vocabularies add blanks; those end no turn
        self._end_of_turn = re.compile("|".join(map(re.escape, ends))) if ends else None
        facts = {
            "template": template,
            "thinking": thinking,
            "mask_rule": MASK_RULE,
            "max_length": max_length,
            "vocabulary": sorted(tokenizer.get_vocab().items()),
            "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        }
        self.settings_hash = _hash(facts)
        small = ("thinking", "mask_rule", "max_length")
        self.facts = {name: value if name in small else _hash(value)[:16] for name, value in facts.items()}

    def sample(self, conversation: Conversation) -> Sample | Dropped:
        """The tokens and loss mask of one row, cut at `max_length`, or why it cannot be trained on."""

        def dropped(reason: str) -> Dropped:
            return Dropped(conversation.id, conversation.row, reason)

        if all(message.role != "assistant" for message in conversation.messages):
            return dropped("no assistant turn")
        try:
            text = self._text(conversation.messages, conversation.tools)
            spans = self._spans(conversation, text)
        except _Refused as refused:
            return dropped(str(refused))
        if not spans:
            return dropped("no supervised token: no answer is rendered as the continuation of its generation prompt")
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        mask = _inside(np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2), spans)
        if not _has_anchor(mask):
            return dropped("fewer than two adjacent supervised tokens")
        ids = np.asarray(encoded["input_ids"][: self._max_length], dtype=np.int32)
        mask = mask[: self._max_length]
        if not _has_anchor(mask):
            return dropped(f"fewer than two adjacent supervised tokens in the first {self._max_length} tokens")
        return Sample(sample_id(ids, mask), conversation.id, conversation.domain, ids, mask)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Token ids up to and including the generation prompt. Raises InputError if the template refuses."""
        try:
            text = self._text(messages, tools, generation_prompt=True)
        except _Refused as refused:
            raise InputError(f"{refused}: these roles were given: {[message.role for message in messages]}") from None
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _text(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], generation_prompt: bool = False
    ) -> str:
        rows = [{"role": message.role, "content": message.content, **message.parts} for message in messages]
        given: dict[str, Any] = {"tools": [dict(tool) for tool in tools]} if tools else {}
        try:
            text = self._tokenizer.apply_chat_template(
                rows, tokenize=False, add_generation_prompt=generation_prompt, **given, **self._flags
            )
        except Exception as error:  # a template is a program: it may raise anything, and must cost its own row only
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise _Refused(f"the chat template refused the row: {first_line[:120]}") from error
        assert isinstance(text, str)
        return text

    def _spans(self, conversation: Conversation, text: str) -> list[tuple[int, int]]:
        """Character ranges of the supervised answers in `text`, in order.

        An answer counts only if the text up to its end is what the target would have written at this point of the
        conversation. Earlier answers whose thinking the template strips do not, nor does an answer that opens the
        conversation: no request leads to it. The end-of-turn token behind an answer that was cut off is not the
        target's.
        """
        messages, tools, spans = conversation.messages, conversation.tools, []
        for turn in range(1, len(messages)):
            if messages[turn].role != "assistant":
                continue
            self._check_printed(messages[: turn + 1], tools)
            if not messages[turn].supervised:
                continue
            head = self._text(messages[:turn], tools, generation_prompt=True)
            closed = conversation.finished or any(later.role == "assistant" for later in messages[turn + 1 :])
            end = self._end(messages[: turn + 1], tools, head, closed)
            if end is not None and text.startswith(end):
                spans.append((len(head), len(end)))
        return spans

    def _check_printed(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        """Refuses an answer of which the template leaves a part out: the target would never have written the rest."""
        *before, last = messages
        for part in ("tool_calls", "reasoning_content"):
            if part in last.parts:
                bare = replace(last, parts={key: value for key, value in last.parts.items() if key != part})
                if self._text(messages, tools) == self._text([*before, bare], tools):
                    raise _Refused(f"the chat template does not print a message's {part}: put it into the content")

    def _end(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], head: str, closed: bool
    ) -> str | None:
        """The text up to the end of the last answer, with its end-of-turn token where it is `closed`.

        None if `head` does not lead to it.

        What the template prints behind the content is found by writing one more character: it may trim, split or
        repeat the content, and the content may hold special tokens itself.
        """
        *before, answer = messages
        text = self._text(messages, tools)
        if not text.startswith(head):
            return None
        shown = text
        if "tool_calls" in answer.parts:
            # Calls are printed behind the content; what closes a plain answer closes them too, or they do not count.
            answer = Message("assistant", "x")
            shown = self._text([*before, answer], tools)
        longer = answer.content + ("y" if answer.content.rstrip().endswith("x") else "x")
        probe = self._text([*before, replace(answer, content=longer)], tools)
        behind = _common_end(shown[len(head) :], probe[len(head) :])
        if not text.endswith(shown[len(shown) - behind :]):
            return None
        content_end = len(text) - behind
        token = self._end_of_turn.search(text, content_end) if self._end_of_turn and closed else None
        return text[: token.end() if token else content_end]


def sample_id(ids_S: NDArray[np.int32], mask_S: NDArray[np.uint8]) -> str:
    """The id of a row: equal rows have equal ids, wherever they come from."""
    return hashlib.sha256(ids_S.astype("<i4").tobytes() + b"|" + mask_S.tobytes()).hexdigest()[:32]


def render_rows(renderer: Renderer, rows: Iterable[Conversation]) -> Iterator[Sample | Dropped]:
    """One result per conversation; of equal samples, the first stays and the others are dropped."""
    seen: set[str] = set()
    for row in rows:
        result = renderer.sample(row)
        if isinstance(result, Sample):
            if result.sample_id in seen:
                result = Dropped(row.id, row.row, DUPLICATE)
            else:
                seen.add(result.sample_id)
        yield result


def render(renderer: Renderer, conversations: Conversations, max_bad_fraction: float) -> Rendered:
    """All samples of `conversations`.

    Raises InputError if more than `max_bad_fraction` of the rows (duplicates aside) cannot be rendered, or if no
    sample is left. What was dropped before, while reading, is neither counted nor repeated here.
    """
    results = list(render_rows(renderer, conversations.rows))
    samples = tuple(result for result in results if isinstance(result, Sample))
    dropped = tuple(result for result in results if isinstance(result, Dropped))
    refuse_bad_rows("rendering with the target's chat template", len(results), dropped, max_bad_fraction)
    if not samples:
        raise InputError(f"no supervised token in any of {len(results)} rows, nothing to train on:\n{reasons(dropped)}")
    return Rendered(samples, dropped)


def _inside(offsets_S2: NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> NDArray[np.uint8]:
    """1 for each token that holds characters and starts within a span. [S]"""
    starts_S, ends_S = offsets_S2[:, 0].copy(), offsets_S2[:, 1]
    # Byte-level tokenizers may report a blank token as an empty range at its end; it starts where the one before ended.
    before_S = np.concatenate([[0], np.maximum.accumulate(ends_S)[:-1]])[: len(ends_S)]
    blank_S = starts_S == ends_S
    starts_S[blank_S] = np.minimum(before_S, starts_S)[blank_S]
    mask_S = np.zeros(len(starts_S), dtype=bool)
    for start, end in spans:
        mask_S |= (start <= starts_S) & (starts_S < end)
    return (mask_S & (starts_S < ends_S)).astype(np.uint8)


def _common_end(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False)))


def _has_anchor(mask: NDArray[np.uint8]) -> bool:
    return bool(np.any(mask[:-1] & mask[1:]))


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
