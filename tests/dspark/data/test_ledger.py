"""The ledger and the folder around it: what survives a kill, and what is refused."""

import json
from pathlib import Path

import pytest

from dspark.data.dialogue import Answer
from dspark.data.ledger import IDENTITY, LEDGER, Ledger, Outcome, begin_folder, check_new, check_resumed, outcome_of
from dspark.errors import InputError

ANSWERED = Outcome("a", (Answer("é\n", "stop", 3), Answer("x", "length", 5, {"reasoning_content": "r"})), None, 1.5)
FAILED = Outcome("b", (), "no room", 0.5)


def started(folder: Path) -> Path:
    begin_folder(folder, {"seed": 1})
    return folder


def test_an_outcome_is_one_line_that_reads_back_as_it_was() -> None:
    assert "\n" not in ANSWERED.line()
    assert [outcome_of(one.line()) for one in (ANSWERED, FAILED)] == [ANSWERED, FAILED]


def test_a_ledger_keeps_whole_lines_through_any_cut_and_goes_on_behind_them(tmp_path: Path) -> None:
    folder = started(tmp_path / "new")
    with Ledger(folder, write=True) as ledger:
        ledger.append([ANSWERED, FAILED])
    whole = (folder / LEDGER).read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(0, len(whole) + 1, 7):
        (folder / LEDGER).write_bytes(whole[:cut])
        with Ledger(folder, write=False) as ledger:
            assert len(ledger) == (cut >= first) + (cut == len(whole))
        assert (folder / LEDGER).stat().st_size == cut  # reading alone changes nothing
        with Ledger(folder, write=True) as ledger:
            kept = len(ledger)
            ledger.append([one for one in (ANSWERED, FAILED) if one.key not in ledger])
            assert (ledger["a"], ledger["b"], len(ledger)) == (ANSWERED, FAILED, 2)
            assert (ledger.seconds, ledger.answers, ledger.tokens) == (2.0, 2, 8)
        assert kept <= 2 and (folder / LEDGER).read_bytes() == whole


def test_a_ledger_has_one_writer_and_names_a_damaged_line(tmp_path: Path) -> None:
    folder = started(tmp_path / "new")
    with Ledger(folder, write=True) as ledger:
        ledger.append([FAILED])
        with pytest.raises(InputError, match="another process is writing"):
            Ledger(folder, write=True)
    (folder / LEDGER).write_bytes(b'{"key": 1}\n' + (folder / LEDGER).read_bytes())
    with pytest.raises(InputError, match=r"answers\.jsonl, line 1, is damaged"):
        Ledger(folder, write=True)


def test_a_folder_is_begun_once_and_resumed_only_as_it_was(tmp_path: Path) -> None:
    folder = started(tmp_path / "new")
    check_resumed(folder, {"seed": 1})
    with pytest.raises(InputError, match="made with seed=1, this run has 2"):
        check_resumed(folder, {"seed": 2})
    with pytest.raises(InputError, match=r"made with prepare\.top_k=None, this run has 5"):
        check_resumed(folder, {"seed": 1, "prepare.top_k": 5})
    check_new(folder)  # nobody was answered yet, so there is nothing to lose
    with Ledger(folder, write=True) as ledger:
        ledger.append([FAILED])
    with pytest.raises(InputError, match="add --resume"):
        check_new(folder)
    with pytest.raises(InputError, match="no folder of prepared rows"):
        check_resumed(tmp_path, {"seed": 1})
    assert json.loads((folder / IDENTITY).read_text()) == {"seed": 1}


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("mine")
    with pytest.raises(InputError, match=r"not empty \(train\.jsonl\)"):
        check_new(tmp_path)
    check_new(tmp_path / "new")
