"""The file of results: written as they arrive, taken up again, and refused where it holds another measurement."""

from dataclasses import replace
from pathlib import Path

import pytest

from dspark.config import Settings
from dspark.data.conversations import Message
from dspark.errors import InputError
from dspark.evaluation.benchmarks import EvaluationPrompt
from jobs.config import load_settings
from jobs.evaluate import drafter_names
from jobs.evaluating import _complete, planned
from jobs.results import ResultsFile, description_of
from jobs.rows import PromptRows
from tests.conftest import tiny_preset
from tests.dspark.evaluation.test_metrics import result_of, round_of

RESULTS = [replace(result_of([round_of(2, 1)], name=name), drafter=drafter) for name in "ab" for drafter in ("x", "y")]
ONE = {"evaluate.batch": [1], "seed": 3}


def test_what_was_written_is_read_and_a_line_that_broke_off_is_not_there(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path, ONE)
    file.begin(RESULTS[:1])
    file.add(RESULTS[1:])
    assert file.read() == RESULTS
    with file.path.open("a") as broken:
        broken.write('{"settings": "half a li')
    again = ResultsFile(tmp_path, ONE)
    again.check(tmp_path)
    assert again.read() == RESULTS
    again.begin(again.read())
    assert file.path.read_text().count("\n") == len(RESULTS) and file.path.read_text().endswith("\n")


def test_another_measurement_is_refused_by_its_first_key_and_its_lines_do_not_count(tmp_path: Path) -> None:
    ResultsFile(tmp_path, ONE).begin(RESULTS)
    other = ResultsFile(tmp_path, {**ONE, "evaluate.batch": [8]})
    with pytest.raises(InputError, match=r"evaluate\.batch was \[1\] and is \[8\] now"):
        other.check(tmp_path)
    assert other.read() == []
    with pytest.raises(InputError, match='drafter x was "not there"'):
        ResultsFile(tmp_path, {**ONE, "drafter x": "1f"}).check(tmp_path)
    with pytest.raises(InputError, match=r"no evaluation\.json there"):
        ResultsFile(tmp_path / "nowhere", ONE).check(tmp_path)


def settings_of(tmp_path: Path, tiny_target: Path, *overrides: str) -> Settings:
    return load_settings(tiny_preset(tmp_path, tiny_target), overrides)


def prompts_of(*later: tuple[str, ...]) -> PromptRows:
    prompts = [
        EvaluationPrompt(f"gsm8k/{i}", "gsm8k", (Message("user", f"{i}?"),), later=turns)
        for i, turns in enumerate(later)
    ]
    return PromptRows(prompts, [[1, 2]] * len(prompts))


def test_the_pool_is_no_part_of_what_is_measured_and_everything_else_is(tmp_path: Path, tiny_target: Path) -> None:
    def describe(*overrides: str, prompts: PromptRows) -> dict[str, object]:
        return description_of(settings_of(tmp_path, tiny_target, *overrides), {}, prompts)

    base = describe(prompts=prompts_of(()))
    pool = ("evaluate.actors=1", "evaluate.max_actors=7", "evaluate.threads=3", "evaluate.cpus=2", "evaluate.gpus=1")
    assert describe(*pool, prompts=prompts_of(())) == base
    for change in (
        "evaluate.batch=2",
        "evaluate.max_new_tokens=9",
        "seed=1",
        "evaluate.turns=all",
        "data.thinking=true",
    ):
        assert describe(change, prompts=prompts_of(())) != base
    assert describe(prompts=prompts_of(("more",))) != base


def test_a_batch_counts_as_done_when_every_turn_of_every_drafter_is_there(tmp_path: Path, tiny_target: Path) -> None:
    settings = settings_of(tmp_path, tiny_target, "evaluate.batch=[2, 1]")
    batches = planned(settings, prompts_of((), ("more",), ()))
    assert [[one.prompt.id for one in batch] for batch in batches] == [
        ["gsm8k/0", "gsm8k/1"], ["gsm8k/2"], ["gsm8k/0"], ["gsm8k/1"], ["gsm8k/2"],
    ]  # fmt: skip
    assert [batch[0].batch for batch in batches] == [2, 2, 1, 1, 1]
    found = [
        replace(result_of([round_of(2, 1)], name=name, domain="gsm8k"), batch=size, turn=turn, drafter=drafter)
        for name, turn in (("gsm8k/0", 1), ("gsm8k/1", 1), ("gsm8k/1/turn-2", 2))
        for size in (2, 1)
        for drafter in ("x", "y")
    ]
    assert _complete(found, batches, ["x", "y"]) == found
    # Without the second turn at batch 2, its batch goes, the other prompt of it too.
    late = next(one for one in found if one.turn == 2 and one.batch == 2)
    kept = _complete([one for one in found if one is not late], batches, ["x", "y"])
    assert {(one.id, one.batch) for one in kept} == {("gsm8k/0", 1), ("gsm8k/1", 1), ("gsm8k/1/turn-2", 1)}


def test_drafters_are_named_as_shortly_as_tells_them_apart() -> None:
    assert drafter_names([Path("runs/a/drafter")]) == ["drafter"]
    assert drafter_names([Path("runs/a/drafter"), Path("runs/b/drafter")]) == ["a", "b"]
    assert drafter_names([Path("/x/one/model"), Path("/y/one/model"), Path("/y/eagle@3")]) == [
        "x/one/model", "y/one/model", "y/eagle-3",
    ]  # fmt: skip
    with pytest.raises(InputError, match="given twice"):
        drafter_names([Path("runs/a"), Path("runs/a")])
