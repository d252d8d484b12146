"""Reading conversations: formats, row shapes, and what is dropped for which reason."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dspark.data.conversations import DUPLICATE, Conversations, Message, conversations_of, read_conversations
from dspark.errors import InputError

HELLO = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]}
BYE = {"conversations": [{"from": "human", "value": "bye"}, {"from": "gpt", "value": "see you"}]}
HELLO_MESSAGES = (Message("user", "hello"), Message("assistant", "hi"))
BYE_MESSAGES = (Message("user", "bye"), Message("assistant", "see you"))


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def read(path: Path, allowed: float = 1.0) -> Conversations:
    return read_conversations(path, {}, allowed)


def read_rows(folder: Path, *rows: Any, **roles: str) -> Conversations:
    """The rows, in front of one that is always usable, so that the file is."""
    path = folder / "rows.jsonl"
    path.write_bytes(lines(*rows, {"turns": ["always usable"]}))
    return read_conversations(path, roles, 1.0)


def texts(read: Conversations) -> list[str]:
    return [row.messages[0].content for row in read.rows]


def dropped(read: Conversations) -> list[tuple[int, str]]:
    return [(row.row, row.reason) for row in read.dropped]


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "nested.json", "a.parquet", "a.parquet.gz"]
)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if "parquet" in name:
        pq.write_table(pa.Table.from_pylist([HELLO | {"conversations": None}, {"messages": None} | BYE]), path)
        if name.endswith(".gz"):
            path.write_bytes(gzip.compress(path.read_bytes()))
    else:
        data: Any = {"version": 1, "data": [HELLO, BYE]} if name == "nested.json" else [HELLO, BYE]
        text = lines(HELLO, BYE) if "jsonl" in name else json.dumps(data).encode()
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)

    found = read(path, allowed=0.0)

    assert [(row.row, row.messages) for row in found.rows] == [(1, HELLO_MESSAGES), (2, BYE_MESSAGES)]
    assert found.dropped == ()


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_row_says_whether_a_token_limit_cut_its_last_answer(tmp_path: Path, name: str) -> None:
    rows: list[dict[str, Any]] = [
        {**HELLO, "finish": "length"}, {**BYE, "finish": "stop"}, {"turns": ["unanswered"]}
    ]  # fmt: skip
    if name == "a.parquet":
        whole: dict[str, Any] = {"messages": None, "conversations": None, "turns": None, "finish": None}
        pq.write_table(pa.Table.from_pylist([whole | row for row in rows]), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(lines(*rows))
    assert [row.finished for row in read(tmp_path / name).rows] == [False, True, True]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_tool_calls_and_definitions_are_read_as_templates_take_them(tmp_path: Path, name: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": null}'}}
    rows: list[dict[str, Any]] = [
        {
            "messages": [
                {"role": "user", "content": "1?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "2", "tool_call_id": "c1"},
                {"role": "assistant", "content": "two", "reasoning_content": "so", "train": False},
            ],
            "tools": json.dumps([{"type": "function", "function": {"name": "add"}}]),
        }
    ]
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(lines(*rows))
    row = read(tmp_path / name, allowed=0.0).rows[0]
    assert row.tools == ({"type": "function", "function": {"name": "add"}},)
    typed = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    assert row.messages == (
        Message("user", "1?"),
        Message("assistant", "", {"tool_calls": [typed]}),
        Message("tool", "2", {"tool_call_id": "c1"}),
        Message("assistant", "two", {"reasoning_content": "so"}, supervised=False),
    )


def test_a_folder_is_read_in_name_order_and_its_row_numbers_run_on(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps([BYE]))
    (tmp_path / "a.jsonl").write_bytes(lines({"turns": ["first"]}) + b"not json\n")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines(HELLO)))
    (tmp_path / ".a.jsonl").write_bytes(b"left by an editor")
    (tmp_path / "notes.txt").write_text("not data")

    found = read(tmp_path)

    assert [(row.row, row.messages[0].content) for row in found.rows] == [(1, "first"), (3, "bye"), (4, "hello")]
    assert [row.row for row in found.dropped] == [2]


def test_blank_lines_are_no_rows_but_count_as_lines_and_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + lines(HELLO) + b"\n  \r\n" + lines(BYE))
    assert [row.row for row in read(path, allowed=0.0).rows] == [1, 4]


def test_a_line_separator_inside_a_text_does_not_end_the_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"turns": ["one\u2028two"]}\n', encoding="utf-8")
    assert texts(read(path)) == ["one\u2028two"]


def test_of_a_prompt_with_several_turns_only_the_first_is_taken(tmp_path: Path) -> None:
    found = read_rows(tmp_path, {"turns": ["first", "second"], "category": "math", "id": 81})
    assert found.rows[0].messages == (Message("user", "first"),)
    assert (found.rows[0].id, found.rows[0].domain) == ("81", "math")


def test_text_parts_are_joined_and_domain_comes_before_category(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = {"messages": [{"role": "user", "content": parts}], "domain": "code", "category": "other"}
    found = read_rows(tmp_path, row)
    assert (found.rows[0].messages[0].content, found.rows[0].domain) == ("ab", "code")


def test_a_missing_id_depends_on_every_message_and_on_nothing_else(tmp_path: Path) -> None:
    def row(*contents: str, **more: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": content} for content in contents], **more}

    ids = [kept.id for kept in read_rows(tmp_path, row("a", "b"), row("a", "c"), row("ab"), row("a")).rows]
    assert len(set(ids)) == 5
    assert all(len(name) == 16 and set(name) <= set("0123456789abcdef") for name in ids)
    again = read_rows(tmp_path, row("z"), row("a", "b", domain="code"))
    assert again.rows[1].id == ids[0]


def test_a_broken_line_costs_itself_only_and_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        lines(HELLO) + b'{"messages": [\n' + b'{"turns": ["\xff"]}\n' + b"[" * 100_000 + b"\n" + lines(BYE)
    )

    found = read(path)

    assert texts(found) == ["hello", "bye"]
    assert dropped(found) == [
        (2, "the line is not valid JSON: Expecting value"),
        (3, "the line is not valid UTF-8"),
        (4, "the line is not valid JSON: a number or the nesting is too large"),
    ]
    with pytest.raises(InputError, match=r"1 x the line is not valid JSON: Expecting value \(row 2\)"):
        read(path, allowed=0.5)


def test_an_unknown_role_drops_the_whole_row_and_is_named(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "bot", "content": "a"}]}
    assert dropped(read_rows(tmp_path, row)) == [(1, "unknown role 'bot'")]
    assert read_rows(tmp_path, row, bot="assistant").rows[0].messages[1] == Message("assistant", "a")


def test_a_role_alias_to_an_unknown_role_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'bot': 'robot'.*data\.roles"):
        read_rows(tmp_path, HELLO, bot="robot")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1, 2], "the row is a list, not an object"),
        ({"text": "plain"}, "the row has none of messages, conversations, turns"),
        ({"messages": []}, "the conversation is empty"),
        ({"messages": "hello"}, "messages is a text, not a list"),
        ({"messages": ["hello"]}, "a message is a text, not an object"),
        ({"messages": [{"content": "no role"}]}, "a message has no role"),
        ({"messages": [{"role": "user", "content": None}]}, "a message has no content"),
        ({"messages": [{"role": "user", "content": {"text": "a"}}]}, "a message's content is an object"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "a message's content holds a part that is not text: 'image'",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
            "a message holds function_call, which no template prints: write it as tool_calls",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "the arguments of a tool call are not valid JSON",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "a tool call names no function"),
        ({"messages": [{"role": "user", "content": "q"}], "tools": "[1]"}, "tools is a list, not a list of objects"),
        (
            {"messages": [{"role": "user", "content": "q"}], "tools": {"f": {}}},
            "tools is an object, not a list of objects",
        ),
        ({"turns": ["\ud800"]}, "the text holds half of a surrogate pair, which no tokenizer can read"),
        ({"turns": ["a"], "domain": ["x"]}, "domain is a list, not a text"),
    ],
)
def test_a_row_of_the_wrong_shape_is_dropped_with_its_reason(tmp_path: Path, row: Any, reason: str) -> None:
    found = read_rows(tmp_path, row)
    assert dropped(found) == [(1, reason)]
    assert texts(found) == ["always usable"]


def test_a_dropped_row_keeps_its_id(tmp_path: Path) -> None:
    assert [row.id for row in read_rows(tmp_path, {"id": "x1", "messages": []}, {"id": {}}).dropped] == ["x1", None]


def test_duplicates_are_dropped_and_counted_but_are_not_bad(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(HELLO | {"id": "a"}, HELLO | {"id": "b"}, BYE, HELLO))
    found = read(path, allowed=0.0)
    assert [row.row for row in found.rows] == [1, 3]
    assert dropped(found) == [(2, DUPLICATE), (4, DUPLICATE)]
    assert found.dropped[0].id == "b"


def test_more_bad_rows_than_allowed_stop_with_counts_and_the_first_three_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = [{"turns": [str(number)]} for number in range(5)]
    bad = [{"messages": []}, {"messages": []}, {"id": 1}, {"messages": []}, {"messages": []}]
    path.write_bytes(lines(*good, *bad))

    with pytest.raises(InputError) as stopped:
        read(path, allowed=0.49)

    message = str(stopped.value)
    assert "5 of 10 rows (50.0%)" in message and "49.0%" in message
    assert "4 x the conversation is empty (rows 6, 7, 9, ...)" in message
    assert "1 x the row has none of messages, conversations, turns (row 8)" in message
    assert len(read(path, allowed=0.5).rows) == 5  # the threshold itself is allowed


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "holds no rows"),
        ("a.jsonl", b"\n\n", "holds no rows"),
        ("a.json", b"", "holds no rows"),
        ("a.json", b"[]", "holds no rows"),
        ("a.json", lines(HELLO, BYE), "not valid JSON.*name it .jsonl"),
        ("a.json", b'{"a": [], "b": []}', "holds an object"),
        ("a.json", b"3", "holds a number"),
        ("a.jsonl", b'{"text": "plain"}\n', "no usable row"),
        ("a.csv", b"a,b", "unsupported suffix.*.jsonl"),
        ("a.jsonl.gz", b"not gzip", "cannot be read"),
        ("a.jsonl.gz", b"", "it has no bytes"),
        ("a.jsonl.gz", gzip.compress(lines(HELLO))[:-12], "cannot be read"),
        ("a.parquet", b"not parquet", "cannot be read"),
    ],
)
def test_an_unusable_file_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"(?s){name}.*{message}"):
        read(tmp_path / name)


def test_missing_paths_empty_folders_and_foreign_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="holds no conversations"):
        read(tmp_path)
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"columns \['text'\]: one of messages, conversations, turns"):
        read(tmp_path / "a.parquet")


def test_with_a_limit_nothing_is_read_behind_what_is_taken_unless_too_much_of_it_is_bad() -> None:
    good = [{"turns": [f"question {number}"]} for number in range(9)]
    rows = [good[0], good[0], {"turns": []}, *good[1:]]
    read = []

    def source() -> Iterator[tuple[int, Any]]:
        for number, row in enumerate(rows, start=1):
            read.append(number)
            yield number, row

    whole = conversations_of("source", source(), {}, 0.25)
    for limit, allowed, last in ((1, 0.25, 1), (2, 0.25, 4), (2, 0.2, 5), (2, 0.1, 10), (9, 0.25, 11), (20, 0.25, 11)):
        read.clear()
        found = conversations_of("source", source(), {}, allowed, limit)
        assert found.rows == whole.rows[:limit] and read[-1] == last
    with pytest.raises(InputError, match=r"1 of 11 rows \(9\.1%\) cannot be used"):
        conversations_of("source", source(), {}, 0.05, 2)
