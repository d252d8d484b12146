"""The inspect command on a file of good and bad rows, with the tokenizer of a tiny target."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.data.conversations import DUPLICATE, read_conversations
from dspark.data.render import Renderer, Sample
from dspark.errors import InputError
from dspark.training.blocks import draw_anchors
from jobs.inspect import inspect
from tests.tiny import tiny_tokenizer

ROWS = [
    json.dumps({"id": "a", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "héllo"}]}),
    "{broken",
    json.dumps({"id": "p", "turns": ["only a prompt"]}),
    json.dumps(
        {"id": "b", "conversations": [{"from": "human", "value": "r"}, {"from": "gpt", "value": "\x1b[2J[red]"}]}
    ),
    json.dumps({"id": "c", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "héllo"}]}),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Only the tokenizer's files: no model must be needed."""
    folder = tmp_path_factory.mktemp("target")
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(ROWS), encoding="utf-8")
    return path


def show(file: Path, target: str, **changes: Any) -> None:
    options: dict[str, Any] = {
        "as_json": False, "max_length": 64, "limit": None, "thinking": None, "anchors": 3, "seed": 7,
    }  # fmt: skip
    inspect(file, target, **options | changes)


def test_json_has_one_object_per_row_in_file_order(file: Path, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    show(file, target, as_json=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert [row["id"] for row in rows] == ["a", None, "p", "b", "c"]
    assert [row["dropped"] for row in rows] == [
        None,
        "the line is not valid JSON: Expecting property name enclosed in double quotes",
        "no assistant turn",
        None,
        DUPLICATE,
    ]
    assert rows[1] == {
        "id": None, "input_ids": [], "loss_mask": [], "anchors": [], "dropped": rows[1]["dropped"],
    }  # fmt: skip
    assert str(tiny_tokenizer().decode(rows[0]["input_ids"])).endswith("assistant\nhéllo<|im_end|>\n")
    assert rows[0]["loss_mask"] == [0] * 20 + [1] * 7 + [0]  # é is two bytes, and the end token counts


def test_anchors_are_those_of_the_first_epoch(file: Path, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    show(file, target, as_json=True)
    row = json.loads(capsys.readouterr().out.splitlines()[0])

    made = Renderer(tiny_tokenizer(), 64, None).sample(read_conversations(file, {}, 1.0).rows[0])
    assert isinstance(made, Sample)
    drawn = draw_anchors(np.array(row["loss_mask"], dtype=np.uint8), 3, seed=7, epoch=0, sample_id=made.sample_id)
    assert row["anchors"] == drawn.tolist()
    assert len(drawn) == 3


def test_the_limit_counts_dropped_rows_too(file: Path, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    show(file, target, as_json=True, limit=2)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_max_length_and_thinking_reach_the_renderer(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flagged = "{% if enable_thinking is defined %}!{% endif %}" + str(tiny_tokenizer().chat_template)
    tiny_tokenizer(flagged).save_pretrained(tmp_path / "flagged")
    show(file, str(tmp_path / "flagged"), as_json=True, limit=1, max_length=23, thinking=False)
    row = json.loads(capsys.readouterr().out)
    assert len(row["input_ids"]) == 23
    assert row["input_ids"][0] == tiny_tokenizer()("!")["input_ids"][0]


def test_the_terminal_shows_text_reasons_and_totals(
    file: Path, target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    show(file, target)
    out = capsys.readouterr().out
    assert "row 1  id a  28 tokens, 7 supervised, 3 anchors" in out
    assert "héllo<|im_end|>" in out
    assert "row 2  dropped: the line is not valid JSON" in out
    assert "row 3  id p  dropped: no assistant turn" in out
    assert "5 rows, 59 tokens, 17 supervised tokens, 3 rows dropped" in out
    assert "1 x the line is not valid JSON" in out and "(row 2)" in out
    assert "\x1b[2J" not in out and "[2J[red]" in out  # data neither steers the terminal nor is taken for markup


def test_supervised_tokens_anchors_and_prompts_differ_in_style(
    file: Path, target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    show(file, target, limit=1, anchors=1)
    out = capsys.readouterr().out
    assert "\x1b[2m" in out and "\x1b[32m" in out and "\x1b[1;4;32m" in out  # dim, green, bold underlined green


def test_an_unusable_file_is_refused(tmp_path: Path, target: str) -> None:
    with pytest.raises(InputError, match="does not exist"):
        show(tmp_path / "none.jsonl", target)
