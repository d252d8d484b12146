"""Datasets on the hub, with a stand-in for the package that would reach it."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dspark.data.conversations import Message, conversations_of
from dspark.data.hub import hub_rows
from dspark.errors import InputError

TURN = {"from": "human", "value": "hi", "role": None}


def stand_in(monkeypatch: pytest.MonkeyPatch, rows: Iterator[Any]) -> list[Any]:
    """A package `datasets` that gives these rows; what it was asked for."""
    asked: list[Any] = []

    def load_dataset(*names: Any, **options: Any) -> Iterator[Any]:
        asked.append((names, options))
        if names[0] == "no/such":
            raise FileNotFoundError("no/such does not exist\nand so on")
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_rows_stream_in_without_the_keys_that_other_rows_have(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stand_in(monkeypatch, iter([{"conversations": [TURN], "tools": None}]))
    found = conversations_of("hub", hub_rows("owner/chats", None, "train"), {}, 0.0)
    assert [row.messages for row in found.rows] == [(Message("user", "hi"),)]
    assert asked == [(("owner/chats", None), {"split": "train", "streaming": True})]


def test_a_dataset_that_is_not_there_or_breaks_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Any]:
        yield {"conversations": [TURN]}
        raise ConnectionError("the line is dead")

    stand_in(monkeypatch, broken())
    with pytest.raises(InputError, match=r"'no/such'.*split='x'.*could not be opened.*does not exist; correct"):
        hub_rows("no/such", "s", "x")
    with pytest.raises(InputError, match="broke off on the hub after row 1: the line is dead"):
        list(hub_rows("owner/chats", None, "train"))


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        hub_rows("owner/chats", None, "train")
