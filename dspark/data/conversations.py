"""Conversations: raw rows of files or of a dataset become typed, distinct rows; what cannot be used is counted.

file, folder or dataset -> raw rows, numbered from 1 -> Conversation or Dropped -> threshold
A row is used whole or dropped whole: leaving out one turn would change what the next one answers.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dspark.data.files import MESSAGE_KEYS, Unusable, files_of, kind_of, numbered
from dspark.errors import InputError

ROLES = ("system", "user", "assistant", "tool")
ALIASES = {"human": "user", "gpt": "assistant"}
# Parts of a turn beside its content, as chat templates know them.
PARTS = ("tool_calls", "reasoning_content", "name", "tool_call_id")
DUPLICATE = "the same as an earlier row"
REASONS_SHOWN = 20


@dataclass(frozen=True)
class Message:
    """One turn; `role` is one of ROLES."""

    role: str
    content: str
    parts: Mapping[str, Any] = field(default_factory=dict, hash=False)  # those of PARTS that it has
    supervised: bool = True  # false: an answer that is context only, since the target did not write it


@dataclass(frozen=True)
class Conversation:
    """One usable row; `row` counts from 1, as an editor counts lines."""

    id: str
    messages: tuple[Message, ...]
    domain: str | None
    row: int
    finished: bool = True  # false: a token limit cut the last answer, so nothing says where it would have ended
    tools: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)  # definitions that the template prints

    @property
    def digest(self) -> str:
        """Hash of all that was said: equal conversations have equal digests, whatever their ids."""
        said = [[one.role, one.content, *([dict(one.parts)] if one.parts else [])] for one in self.messages]
        text = json.dumps([said, list(self.tools)] if self.tools else said, ensure_ascii=False, default=str)
        return hashlib.sha256(_encoded(text)).hexdigest()


@dataclass(frozen=True)
class Dropped:
    """A row left out; rows with the same fault share the same `reason`."""

    id: str | None
    row: int
    reason: str


def main_reasons(dropped: Sequence[Dropped]) -> str:
    """The three most frequent reasons, in brackets behind a count of dropped rows; empty if there are none."""
    counts = Counter(one.reason for one in dropped)
    listed = "; ".join(f"{count} x {reason}" for reason, count in counts.most_common(3))
    return f" ({listed})" if listed else ""


@dataclass(frozen=True)
class Conversations:
    """What a file held, both parts in its order."""

    rows: tuple[Conversation, ...]
    dropped: tuple[Dropped, ...]


def read_conversations(path: Path, roles: Mapping[str, str], max_bad_fraction: float) -> Conversations:
    """Read `path`: a .jsonl, .json or .parquet file (also as .gz), or a folder of them in name order.

    Rows of .json and .parquet are numbered by position, of .jsonl by line; through the files of a folder the numbers
    run on. `conversations_of` says what a row holds, what is dropped and what is refused.
    """
    return conversations_of(str(path), numbered(files_of(path)), roles, max_bad_fraction)


def conversations_of(
    source: str,
    rows: Iterable[tuple[int, Any]],
    roles: Mapping[str, str],
    max_bad_fraction: float,
    limit: int | None = None,
) -> Conversations:
    """The usable ones of numbered raw rows, at most the first `limit` of them; `source` names them in errors.

    A row holds `messages` or `conversations`, a list of {role, content} or {from, value}, or `turns`, a list of user
    texts of which only the first is taken: the later ones need answers that the row does not have. `id` and `domain`
    (or `category`) are optional; a missing id becomes a hash of the messages. `finish: length` says that a token limit
    cut the last answer, `train: false` in a message that its answer is context only. `tools` holds tool definitions, as
    a list or as its JSON text. `roles` adds names to the built-in aliases human and gpt.

    Raises InputError for rows that cannot be read, if none is usable, or if more than `max_bad_fraction` of the rows is
    dropped; duplicates are dropped too, but are not bad. With a `limit` no row is read behind the last one that is
    taken, unless too many of those before it are bad: then more are counted, but not kept, until few enough are.
    """
    known = {role: role for role in ROLES} | ALIASES | dict(roles)
    strange = {alias: role for alias, role in known.items() if role not in ROLES}
    if strange:
        raise InputError(f"role aliases {strange} lead to unknown roles: data.roles may name {', '.join(ROLES)}")
    kept: list[Conversation] = []
    dropped: list[Dropped] = []
    seen: set[str] = set()
    read = bad = 0
    for row, raw in rows:
        read += 1
        try:
            conversation = _conversation(raw, row, known)
            digest = conversation.digest
        except Unusable as reason:
            dropped.append(Dropped(_id_of(raw), row, str(reason)))
            bad += 1
            continue
        if digest in seen:
            dropped.append(Dropped(conversation.id, row, DUPLICATE))
        elif limit is None or len(kept) < limit:
            seen.add(digest)
            kept.append(conversation if conversation.id else replace(conversation, id=digest[:16]))
        if len(kept) == limit and bad / read <= max_bad_fraction:
            break
    if not read:
        raise InputError(f"{source} holds no rows: one conversation per line or list element is needed")
    refuse_bad_rows(source, read, dropped, max_bad_fraction)
    if not kept:
        raise InputError(f"{source} holds no usable row:\n{reasons(dropped)}")
    return Conversations(tuple(kept), tuple(dropped))


def refuse_bad_rows(source: str, total: int, dropped: Iterable[Dropped], allowed: float) -> None:
    """Raise InputError if the dropped rows, duplicates aside, are more than the share `allowed` of all `total` rows."""
    bad = [row for row in dropped if row.reason != DUPLICATE]
    if bad and len(bad) / total > allowed:
        raise InputError(
            f"{source}: {len(bad)} of {total} rows ({len(bad) / total:.1%}) cannot be used, at most {allowed:.1%} may "
            f"be dropped:\n{reasons(bad)}\nrepair these rows, name their roles in data.roles, or raise "
            "data.max_bad_fraction"
        )


def reasons(dropped: Iterable[Dropped]) -> str:
    """One line per reason, the most frequent first, with its count and its first three row numbers."""
    rows_by_reason: dict[str, list[int]] = {}
    for row in dropped:
        rows_by_reason.setdefault(row.reason, []).append(row.row)
    ranked = sorted(rows_by_reason.items(), key=lambda item: -len(item[1]))
    lines = []
    for reason, rows in ranked[:REASONS_SHOWN]:
        places = ", ".join(map(str, rows[:3])) + (", ..." if len(rows) > 3 else "")
        lines.append(f"  {len(rows)} x {reason} (row{'s' if len(rows) > 1 else ''} {places})")
    if len(ranked) > REASONS_SHOWN:
        lines.append(f"  and {len(ranked) - REASONS_SHOWN} more reasons")
    return "\n".join(lines)


def _conversation(raw: Any, row: int, roles: Mapping[str, str]) -> Conversation:
    """The typed row; its id is empty where it has none."""
    if isinstance(raw, Unusable):
        raise raw
    if not isinstance(raw, dict):
        raise Unusable(f"the row is {kind_of(raw)}, not an object")
    key = next((key for key in MESSAGE_KEYS if raw.get(key) is not None), None)
    if key is None:
        raise Unusable(f"the row has none of {', '.join(MESSAGE_KEYS)}")
    turns = raw[key]
    if not isinstance(turns, list):
        raise Unusable(f"{key} is {kind_of(turns)}, not a list")
    if not turns:
        raise Unusable("the conversation is empty")
    if key == "turns":
        messages: tuple[Message, ...] = (Message("user", _content(turns[0])),)
    else:
        messages = tuple(_message(turn, roles) for turn in turns)
    domain = _label(raw, "domain") or _label(raw, "category")
    finished = raw.get("finish") != "length"
    return Conversation(_label(raw, "id") or "", messages, domain, row, finished, _tools(raw.get("tools")))


def _message(turn: Any, roles: Mapping[str, str]) -> Message:
    if not isinstance(turn, dict):
        raise Unusable(f"a message is {kind_of(turn)}, not an object")
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str):
        raise Unusable("a message has no role")
    if role not in roles:
        raise Unusable(f"unknown role {role[:40]!r}")
    if turn.get("function_call"):
        raise Unusable("a message holds function_call, which no template prints: write it as tool_calls")
    parts = {key: turn[key] for key in PARTS if turn.get(key)}
    if "tool_calls" in parts:
        parts["tool_calls"] = typed_calls(parts["tool_calls"])
    content = turn.get("content", turn.get("value"))
    # A turn that only calls a tool says nothing.
    text = "" if content is None and "tool_calls" in parts else _content(content)
    return Message(roles[role], text, parts, turn.get("train") is not False)


def typed_calls(calls: Any) -> list[dict[str, Any]]:
    """Tool calls as templates read them: arguments that came as JSON text become values. Raises Unusable."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Unusable("a message's tool_calls is not a list of objects")
    typed = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unusable("a tool call names no function")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                raise Unusable("the arguments of a tool call are not valid JSON") from None
        more = {key: value for key, value in call.items() if key in ("id", "type")}
        typed.append({"type": "function", **more, "function": {"name": function["name"], "arguments": arguments}})
    return typed


def _tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except ValueError:
            raise Unusable("tools is a text that is not valid JSON") from None
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Unusable(f"tools is {kind_of(tools)}, not a list of objects")
    return tuple(tools)


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Unusable("a message has no content" if content is None else f"a message's content is {kind_of(content)}")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            found = repr(part.get("type"))[:40] if isinstance(part, dict) else kind_of(part)
            raise Unusable(f"a message's content holds a part that is not text: {found}")
    return "".join(part["text"] for part in content)


def _label(raw: Mapping[str, Any], key: str) -> str | None:
    value = raw.get(key)
    if value is None or value == "":
        return None
    if not isinstance(value, (str, int)):
        raise Unusable(f"{key} is {kind_of(value)}, not a text")
    _encoded(str(value))
    return str(value)


def _id_of(raw: Any) -> str | None:
    """The id of a row that cannot be used otherwise."""
    try:
        return _label(raw, "id") if isinstance(raw, dict) else None
    except Unusable:
        return None


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise Unusable("the text holds half of a surrogate pair, which no tokenizer can read") from None
