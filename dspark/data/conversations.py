"""Conversations from files: JSON lines, JSON or parquet become typed, distinct rows; what cannot be used is counted.

file or folder -> raw rows, numbered from 1 -> Conversation or Dropped -> threshold
A row is used whole or dropped whole: leaving out one turn would change what the next one answers.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dspark.errors import InputError

ROLES = ("system", "user", "assistant", "tool")
ALIASES = {"human": "user", "gpt": "assistant"}
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
MESSAGE_KEYS = ("messages", "conversations", "turns")
LABEL_KEYS = ("id", "domain", "category", "finish")
# Parts of an answer that a Message cannot hold: without them the target would never have written the rest.
UNSUPPORTED = ("tool_calls", "function_call", "reasoning_content")
DUPLICATE = "the same as an earlier row"
REASONS_SHOWN = 20


@dataclass(frozen=True)
class Message:
    """One turn; `role` is one of ROLES."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """One usable row; `row` counts from 1, as an editor counts lines."""

    id: str
    messages: tuple[Message, ...]
    domain: str | None
    row: int
    finished: bool = True  # false: a token limit cut the last answer, so nothing says where it would have ended


@dataclass(frozen=True)
class Dropped:
    """A row left out; rows with the same fault share the same `reason`."""

    id: str | None
    row: int
    reason: str


@dataclass(frozen=True)
class Conversations:
    """What a file held, both parts in its order."""

    rows: tuple[Conversation, ...]
    dropped: tuple[Dropped, ...]


class _Unusable(Exception):
    """The reason why the row at hand is dropped."""


def read_conversations(path: Path, roles: Mapping[str, str], max_bad_fraction: float) -> Conversations:
    """Read `path`: a .jsonl, .json or .parquet file (text also as .gz), or a folder of them in name order.

    A row holds `messages` or `conversations`, a list of {role, content} or {from, value}, or `turns`, a list of user
    texts of which only the first is taken: the later ones need answers that the row does not have. `id` and `domain`
    (or `category`) are optional; a missing id becomes a hash of the messages. `finish: length` says that a token limit
    cut the last answer. Tool definitions beside the messages are
    not read. `roles` adds names to the built-in aliases human and gpt. Rows of .json and .parquet are numbered by
    position, of .jsonl by line; through the files of a folder the numbers run on.

    Raises InputError for a file that cannot be read, that holds no usable row, or of which more than
    `max_bad_fraction` of the rows is dropped; duplicates are dropped too, but are not bad.
    """
    known = {role: role for role in ROLES} | ALIASES | dict(roles)
    strange = {alias: role for alias, role in known.items() if role not in ROLES}
    if strange:
        raise InputError(f"role aliases {strange} lead to unknown roles: data.roles may name {', '.join(ROLES)}")
    kept: list[Conversation] = []
    dropped: list[Dropped] = []
    seen: set[str] = set()
    for row, raw in _numbered(_files(path)):
        try:
            conversation, digest = _conversation(raw, row, known)
        except _Unusable as reason:
            dropped.append(Dropped(_id_of(raw), row, str(reason)))
            continue
        if digest in seen:
            dropped.append(Dropped(conversation.id, row, DUPLICATE))
        else:
            seen.add(digest)
            kept.append(conversation)
    if not kept and not dropped:
        raise InputError(f"{path} holds no rows: one conversation per line or list element is needed")
    refuse_bad_rows(str(path), len(kept) + len(dropped), dropped, max_bad_fraction)
    if not kept:
        raise InputError(f"{path} holds no usable row:\n{reasons(dropped)}")
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


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES) and file.name[0] != ".")
        if not files:
            raise InputError(f"folder {path} holds no conversations: it needs files that end in {', '.join(SUFFIXES)}")
        return files
    if not path.exists():
        raise InputError(f"{path} does not exist: give a file that ends in {', '.join(SUFFIXES)}, or a folder of them")
    if not path.name.endswith(SUFFIXES):
        raise InputError(f"{path} has an unsupported suffix: needed is one of {', '.join(SUFFIXES)}")
    return [path]


def _numbered(files: Sequence[Path]) -> Iterator[tuple[int, Any]]:
    """(row number, raw row) through all files; a row that is no JSON comes as the _Unusable that says so."""
    before = 0
    for file in files:
        row = 0
        try:
            for row, raw in _rows_of(file):
                yield before + row, raw
        except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
            raise InputError(f"{file} cannot be read after row {row}: {error}; write it again") from error
        before += row


def _rows_of(file: Path) -> Iterator[tuple[int, Any]]:
    if file.suffix == ".parquet":
        yield from enumerate(_parquet_rows(file), start=1)
        return
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
        if file.name.removesuffix(".gz").endswith(".json"):
            yield from enumerate(_json_list(file, stream.read()), start=1)
            return
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, _json_line(line)


def _parquet_rows(file: Path) -> Iterator[Any]:
    with pq.ParquetFile(file) as table:
        found = table.schema_arrow.names
        if not set(found) & set(MESSAGE_KEYS):
            raise InputError(f"{file} holds the columns {found}: one of {', '.join(MESSAGE_KEYS)} is needed")
        columns = [name for name in found if name in MESSAGE_KEYS + LABEL_KEYS]
        for batch in table.iter_batches(batch_size=256, columns=columns):
            yield from batch.to_pylist()


def _json_list(file: Path, text: bytes) -> list[Any]:
    if not text.strip():
        return []
    try:
        data = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not valid JSON: {error}; if it holds one row per line, name it .jsonl") from error
    lists = [value for value in data.values() if isinstance(value, list)] if isinstance(data, dict) else [data]
    if len(lists) != 1 or not isinstance(lists[0], list):
        raise InputError(f"{file} holds {_kind(data)}: needed is a list of rows, or an object with one key that has it")
    return lists[0]


def _json_line(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        return _Unusable(f"the line is not valid JSON: {error.msg}")
    except UnicodeDecodeError:
        return _Unusable("the line is not valid UTF-8")
    except (ValueError, RecursionError):
        return _Unusable("the line is not valid JSON: a number or the nesting is too large")


def _conversation(raw: Any, row: int, roles: Mapping[str, str]) -> tuple[Conversation, str]:
    """The typed row and the hash by which its duplicates are known."""
    if isinstance(raw, _Unusable):
        raise raw
    if not isinstance(raw, dict):
        raise _Unusable(f"the row is {_kind(raw)}, not an object")
    key = next((key for key in MESSAGE_KEYS if raw.get(key) is not None), None)
    if key is None:
        raise _Unusable(f"the row has none of {', '.join(MESSAGE_KEYS)}")
    turns = raw[key]
    if not isinstance(turns, list):
        raise _Unusable(f"{key} is {_kind(turns)}, not a list")
    if not turns:
        raise _Unusable("the conversation is empty")
    if key == "turns":
        messages: tuple[Message, ...] = (Message("user", _content(turns[0])),)
    else:
        messages = tuple(_message(turn, roles) for turn in turns)
    pairs = json.dumps([[message.role, message.content] for message in messages], ensure_ascii=False)
    digest = hashlib.sha256(_encoded(pairs)).hexdigest()
    domain = _label(raw, "domain") or _label(raw, "category")
    finished = raw.get("finish") != "length"
    return Conversation(_label(raw, "id") or digest[:16], messages, domain, row, finished), digest


def _message(turn: Any, roles: Mapping[str, str]) -> Message:
    if not isinstance(turn, dict):
        raise _Unusable(f"a message is {_kind(turn)}, not an object")
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str):
        raise _Unusable("a message has no role")
    if role not in roles:
        raise _Unusable(f"unknown role {role[:40]!r}")
    lost = [key for key in UNSUPPORTED if turn.get(key)]
    if lost:
        raise _Unusable(f"a message holds {lost[0]}, which is not rendered: put what it says into the content")
    return Message(roles[role], _content(turn.get("content", turn.get("value"))))


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _Unusable("a message has no content" if content is None else f"a message's content is {_kind(content)}")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            found = repr(part.get("type"))[:40] if isinstance(part, dict) else _kind(part)
            raise _Unusable(f"a message's content holds a part that is not text: {found}")
    return "".join(part["text"] for part in content)


def _label(raw: Mapping[str, Any], key: str) -> str | None:
    value = raw.get(key)
    if value is None or value == "":
        return None
    if not isinstance(value, (str, int)):
        raise _Unusable(f"{key} is {_kind(value)}, not a text")
    _encoded(str(value))
    return str(value)


def _id_of(raw: Any) -> str | None:
    """The id of a row that cannot be used otherwise."""
    try:
        return _label(raw, "id") if isinstance(raw, dict) else None
    except _Unusable:
        return None


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise _Unusable("the text holds half of a surrogate pair, which no tokenizer can read") from None


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a truth value",
        int: "a number",
        float: "a number",
    }
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
