"""Finished rows: they read back as what they were, and each conversation ends in one file."""

import json
from pathlib import Path
from typing import Any

import pytest

from dspark.data.conversations import Conversation, Dropped, Message, read_conversations
from dspark.data.dialogue import Answer, Dialogue
from dspark.data.ledger import Outcome
from dspark.data.prepared import CUT, FAILURES, MANIFEST, Making, check_prepared, row_json, write_prepared
from dspark.data.render import Renderer, Sample
from dspark.decoding.answers import answer_text
from dspark.errors import InputError
from tests.tiny import CHATML, tiny_tokenizer

RENDERER = Renderer(tiny_tokenizer(CHATML), 64, None)
FACTS = {"source": "here", "target": {"name": "t", "fingerprint": "f"}}


def making(keep_cut: bool = False) -> Making:
    return Making({"seed": 1}, RENDERER, 0.3, 0.3, keep_cut)


def asked(number: int) -> Conversation:
    return Conversation(f"c{number}", (Message("user", f"q{number}"),), None, number)


def answered(row: Conversation, text: str = "fine", finish: str = "stop") -> Outcome:
    return Outcome(row.digest, (Answer(text, "length" if finish == "length" else "stop", 4),), None, 0.1)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_row_reads_back_as_the_same_conversation(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": None}}}
    messages = (
        Message("user", "q"),
        Message("assistant", "", {"tool_calls": [call]}, supervised=False),
        Message("tool", "r", {"name": "f"}),
        Message("assistant", "é", {"reasoning_content": "hm"}),
    )
    row = Conversation("c", messages, "math", 1, finished=False, tools=({"type": "function"},))
    (tmp_path / "a.jsonl").write_text(json.dumps(row_json(row)) + "\n")
    assert read_conversations(tmp_path / "a.jsonl", {}, 0.0).rows == (row,)


def test_the_prompt_that_was_asked_and_the_tokens_that_came_are_the_row_that_is_trained() -> None:
    tokenizer = tiny_tokenizer(CHATML)
    dialogue = Dialogue(asked(1))
    assert dialogue.context is not None
    prompt = RENDERER.prompt(dialogue.context)
    for finish, end in (("stop", "<|im_end|>"), ("length", "")):
        tokens = tokenizer(f"é <think> ,{end}")["input_ids"]
        text = answer_text(tokenizer, tokens, "length" if finish == "length" else "stop")
        row = making(keep_cut=True).row(asked(1), answered(asked(1), text, finish))
        assert isinstance(row, dict) and row["supervised"] == len(tokens)
        again = Dialogue(asked(1))
        again.take(answered(asked(1), text, finish).answers[0])
        sample = RENDERER.sample(again.row())
        assert isinstance(sample, Sample)
        assert sample.input_ids[: len(prompt) + len(tokens)].tolist() == [*prompt, *tokens]
        assert sample.loss_mask.nonzero()[0].tolist() == [len(prompt) + i for i in range(len(tokens))]


def test_every_conversation_ends_in_one_file_and_the_manifest_counts_them(tmp_path: Path) -> None:
    rows = [asked(number) for number in range(1, 31)]
    outcomes = [answered(row) for row in rows]
    outcomes[0] = answered(rows[0], "half", "length")
    outcomes[1] = Outcome(rows[1].digest, (), "no room", 0.0)
    outcomes[2] = answered(rows[2], "")  # renders to a turn with nothing but its end
    for keep_cut in (False, True):
        made = making(keep_cut)
        results = (made.row(row, outcome) for row, outcome in zip(rows, outcomes, strict=True))
        manifest = write_prepared(tmp_path, made, rows, results, [Dropped("d", 99, "odd")], FACTS, 0.1)
        assert json.loads((tmp_path / MANIFEST).read_text()) == manifest
        read = {
            name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
            for name in manifest["files"]
        }
        assert {name: len(found) for name, found in read.items()} == {
            name: counts["rows"] for name, counts in manifest["files"].items()
        }
        failed = lines(tmp_path / FAILURES)
        ids = [row["id"] for found in (*read.values(), failed) for row in found]
        assert sorted(ids) == sorted(["d", *(row.id for row in rows)])
        assert min(len(found) for found in read.values()) > 0
        cut = [row for found in read.values() for row in found if row["finish"] == "length"]
        assert [row["id"] for row in cut] == (["c1"] if keep_cut else [])
        reasons = {"odd": 1, "no room": 1, "fewer than two adjacent supervised tokens": 1}
        assert manifest["failures"] == (reasons if keep_cut else reasons | {CUT: 1})


def test_too_many_failures_leave_the_earlier_files_and_say_why(tmp_path: Path) -> None:
    rows = [asked(1), asked(2)]
    made = making()
    good = [made.row(row, answered(row)) for row in rows]
    write_prepared(tmp_path, made, rows, good, [], FACTS, 0.4)
    before = {name: (tmp_path / name).read_bytes() for name in ("train.jsonl", MANIFEST)}
    bad = [good[0], Dropped("c2", 2, "the server was rude")]
    with pytest.raises(InputError, match=r"(?s)1 of 2 rows \(50\.0%\).*1 x the server was rude"):
        write_prepared(tmp_path, made, rows, bad, [], FACTS, 0.4)
    assert before == {name: (tmp_path / name).read_bytes() for name in before}
    assert "rude" in (tmp_path / FAILURES).read_text()


def test_a_data_file_is_held_to_the_manifest_beside_it_and_to_no_other(tmp_path: Path) -> None:
    rows, made = [asked(1)], making()
    write_prepared(tmp_path, made, rows, [made.row(rows[0], answered(rows[0]))], [], FACTS, 0.0)
    check_prepared(tmp_path / "train.jsonl", Renderer(tiny_tokenizer(CHATML), 9, None), "f")
    check_prepared(tmp_path / "mine.jsonl", Renderer(tiny_tokenizer(CHATML), 9, True), "other")
    with pytest.raises(InputError, match=r"answers of the target t .*weights other"):
        check_prepared(tmp_path / "train.jsonl", RENDERER, "other")
    with pytest.raises(InputError, match=r"thinking=None, this run has True.*data\.thinking"):
        check_prepared(tmp_path / "train.jsonl", Renderer(tiny_tokenizer(CHATML), 64, True), "f")
    with pytest.raises(InputError, match=r"rendering template='\w+', this run has '\w+'"):
        check_prepared(tmp_path / "train.jsonl", Renderer(tiny_tokenizer(CHATML + " "), 64, None), "f")
    (tmp_path / MANIFEST).write_text('{"files": {"train.jsonl": {}}}')
    with pytest.raises(InputError, match=r"prepare\.json says how train\.jsonl was made, but cannot be read.*target"):
        check_prepared(tmp_path / "train.jsonl", RENDERER, "f")
