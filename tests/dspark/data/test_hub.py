"""Datasets through the package that reaches the hub, from folders that it takes for datasets too."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dspark.data.conversations import Message, conversations_of
from dspark.data.hub import hub_rows
from dspark.errors import InputError

CHAT = {"conversations": [{"from": "human", "value": "hi"}]}
TOOLS = {**CHAT, "tools": ["a tool"]}


@pytest.fixture(autouse=True)
def its_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def dataset(tmp_path: Path, *rows: Any) -> str:
    """A dataset of one split `train`; a row that is text stands there as it is."""
    folder = tmp_path / "chats"
    folder.mkdir()
    lines: Sequence[str] = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "train.jsonl").write_text("\n".join(lines))
    return str(folder)


def test_rows_stream_in_without_the_keys_that_other_rows_have(tmp_path: Path) -> None:
    rows = list(hub_rows(dataset(tmp_path, TOOLS, CHAT), None, "train"))
    assert rows == [(1, TOOLS), (2, CHAT)]
    found = conversations_of("hub", iter(rows[1:]), {}, 0.0)
    assert [row.messages for row in found.rows] == [(Message("user", "hi"),)]


def test_a_dataset_or_split_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'no/such'.*split='x'.*could not be opened.*no/such.*; correct"):
        hub_rows("no/such", "s", "x")
    with pytest.raises(InputError, match=r"split='test' could not be opened.*Available splits.*train"):
        hub_rows(dataset(tmp_path, CHAT), None, "test")


def test_a_dataset_that_breaks_off_says_after_which_row(tmp_path: Path) -> None:
    rows = hub_rows(dataset(tmp_path, CHAT, "{"), None, "train")
    with pytest.raises(InputError, match=r"broke off on the hub after row \d: .*; try again, or download it"):
        list(rows)


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        hub_rows("owner/chats", None, "train")
