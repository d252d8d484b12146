"""`dspark prepare` from a file to rows that `train` takes: by actors of a real Ray, killed and resumed, by servers."""

import json
import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from dspark.config import Settings
from dspark.data.ledger import LEDGER, Ledger, outcome_of
from dspark.decoding.answers import Asking, answer_all, engine_respond
from dspark.decoding.engine import Engine
from dspark.errors import InputError
from dspark.target import load_target
from jobs.config import load_settings
from jobs.prepare import prepare
from jobs.preparing import plan_work
from jobs.rows import prepare_prompts, prepare_rows
from tests.conftest import tiny_preset
from tests.jobs import runs
from tests.servers import Reply, Server, always, completion, serving
from tests.tiny import tiny_target_folder

start = partial(runs.start, command="prepare")
ANSWERS: dict[str, Any] = {
    "validation": 0.2, "held_out": 0.3, "max_tokens": 12, "keep_cut": True, "batch": 3, "task_rows": 4
}  # fmt: skip


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that recommends to be sampled, and for whom many tokens end a text."""
    folder = tiny_target_folder(tmp_path_factory.mktemp("talkative"))
    config = {"do_sample": True, "temperature": 0.9, "top_k": 100, "eos_token_id": [258, *range(24)]}
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


def source(folder: Path, count: int = 24) -> Path:
    """Conversations of one or two turns, a duplicate, a question that was asked before, and a broken line."""
    rows: list[dict[str, Any]] = []
    for i in range(count):
        messages = [
            {"role": "user", "content": f"question {i} " + "?" * i},
            {"role": "assistant", "content": "recorded"},
        ]
        if i % 3 == 0:
            messages += [{"role": "user", "content": f"and then {i}"}, {"role": "assistant", "content": "recorded too"}]
        rows.append({"id": f"row-{i}", "domain": "chat", "messages": messages})
    rows += [rows[0], {"id": "again", "messages": [{"role": "user", "content": "question 1 ?"}]}]
    text = "".join(json.dumps(row) + "\n" for row in rows) + "{\n"
    (folder / "source.jsonl").write_text(text)
    return folder / "source.jsonl"


def preset_for(folder: Path, target: Path, **prepare: Any) -> Path:
    wanted = {**ANSWERS, "source": str(source(folder)), "folder": str(folder / "prepared"), **prepare}
    return tiny_preset(folder, target, data={"max_bad_fraction": 0.5}, prepare=wanted)


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def answered(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Messages of all finished rows by id."""
    names = ("train.jsonl", "validation.jsonl", "held_out.jsonl")
    return {row["id"]: row["messages"] for name in names for row in rows_of(folder, name)}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, talkative: Path, local_ray: None) -> Path:
    """The preset of a finished preparation by two actors."""
    preset = preset_for(tmp_path_factory.mktemp("prepared"), talkative, actors=2)
    prepare(load_settings(preset, []), None, False)
    return preset


def test_every_conversation_ends_in_one_file_with_the_targets_answers(prepared: Path) -> None:
    folder = prepared.parent / "prepared"
    manifest = json.loads((folder / "prepare.json").read_text())
    done, failed = answered(folder), rows_of(folder, "failures.jsonl")
    counted = sum(count["rows"] for count in manifest["files"].values())
    assert counted == len(done) > 15 and counted + len(failed) == 27  # 24 rows, two of them again, a broken line
    assert {(row["row"], row["reason"].partition(":")[0]) for row in failed} >= {
        (25, "the same as an earlier row"),
        (26, "its final user text is that of an earlier row"),
        (27, "the line is not valid JSON"),
    }
    assert not any("recorded" in message["content"] for messages in done.values() for message in messages)
    assert [message["role"] for message in done["row-3"]] in (["user", "assistant"] * 2, ["user", "assistant"])
    assert manifest["settings"]["prepare.temperature"] == 0.9 and manifest["settings"]["prepare.top_k"] == 100
    finishes = {row["finish"] for name in manifest["files"] for row in rows_of(folder, name)}
    assert finishes == {"stop", "length"}
    assert {row["settings"] for row in rows_of(folder, "train.jsonl")} == {manifest["settings_hash"]}


def test_the_answers_do_not_depend_on_actors_batches_and_tasks(prepared: Path) -> None:
    work = plan_work(load_settings(prepared, []), None)
    target = load_target(work.settings.target)
    asking = Asking(work.making.renderer, work.sampling, work.settings.prepare.max_tokens, work.max_length)
    alone = engine_respond(Engine(target, None, 1, work.max_length))
    with Ledger(work.folder, write=False) as ledger:
        assert len(ledger) == len(work.rows) == 24
        for row in work.rows[:6]:  # two of them have two turns
            (expected,) = answer_all([row], asking, alone, target.tokenizer)
            assert ledger[row.digest].answers == expected.answers


def test_training_takes_the_files_and_refuses_another_rendering_or_target(prepared: Path, tiny_target: Path) -> None:
    folder = prepared.parent / "prepared"
    data = [f"data.conversations={folder}/train.jsonl", f"data.held_out={folder}/held_out.jsonl"]
    few = ["evaluate.prompts_t0=1", "evaluate.prompts_t1=1", "drafter.vocab=null"]
    settings = load_settings(prepared, [*data, *few])
    rows = prepare_rows(settings)
    manifest = json.loads((folder / "prepare.json").read_text())["files"]["train.jsonl"]
    assert (rows.table.num_rows, rows.tokens, rows.dropped) == (manifest["rows"], manifest["tokens"], ())
    assert prepare_rows(load_settings(prepared, [*data, *few, "data.max_length=64"])).tokens < rows.tokens
    tokenizer = AutoTokenizer.from_pretrained(settings.target.model)
    assert prepare_prompts(settings, tokenizer).prompts[0].id in answered(folder)
    other = load_settings(prepared, [*data, *few, "data.thinking=false"])
    with pytest.raises(InputError, match=r"thinking=None, this run has False.*data\.thinking"):
        prepare_rows(other)
    with pytest.raises(InputError, match=r"held_out\.jsonl.*thinking=None"):
        prepare_prompts(other, tokenizer)
    another = tiny_target_folder(prepared.parent / "another", seed=5)
    with pytest.raises(InputError, match="holds answers of the target"):
        prepare_rows(load_settings(prepared, [*data, *few, f"target.model={another}"]))


def test_a_dry_run_prints_the_plan_and_touches_nothing(
    tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preset = preset_for(tmp_path, tiny_target)
    before = sorted(tmp_path.rglob("*"))
    prepare(load_settings(preset, []), None, True)
    printed = " ".join(capsys.readouterr().out.split())
    assert "24 conversations; 3 dropped" in printed and "32 to write in 24 conversations" in printed
    assert "temperature 1, top_p 1, top_k 0, min_p 0" in printed
    assert sorted(tmp_path.rglob("*")) == before


def test_no_more_of_a_source_is_read_than_the_limit_asks_for(tmp_path: Path, tiny_target: Path) -> None:
    preset = preset_for(tmp_path, tiny_target)
    (tmp_path / "chats").mkdir()
    (tmp_path / "source.jsonl").rename(tmp_path / "chats" / "a.jsonl")
    (tmp_path / "chats" / "b.parquet").write_text("no parquet")
    overrides = [f"prepare.source={tmp_path}/chats", "prepare.limit=5"]
    assert [row.id for row in plan_work(load_settings(preset, overrides), None).rows] == [f"row-{i}" for i in range(5)]
    with pytest.raises(InputError, match=r"b\.parquet cannot be read"):
        plan_work(load_settings(preset, overrides[:1]), None)


def test_a_finished_folder_is_kept_and_resumed_only_with_its_own_settings(
    prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = prepared.parent / "prepared"
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(InputError, match="holds prepared rows already: add --resume"):
        prepare(load_settings(prepared, []), None, False)
    for override, found in (
        ("prepare.temperature=0.5", r"prepare\.temperature=0\.9, this run has 0\.5"),
        ("seed=3", "seed=42, this run has 3"),
        ("data.thinking=true", "data.thinking=None, this run has True"),
    ):
        with pytest.raises(InputError, match=found):
            prepare(load_settings(prepared, [override]), folder, False)
    with pytest.raises(InputError, match="are two folders"):
        prepare(load_settings(prepared, []), folder.parent, False)
    prepare(load_settings(prepared, []), folder, True)
    assert "0 to write in 0 conversations" in " ".join(capsys.readouterr().out.split())
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    prepare(load_settings(prepared, ["prepare.keep_cut=false"]), folder, False)  # nothing is asked again
    assert all(row["finish"] == "stop" for row in rows_of(folder, "train.jsonl"))
    assert "an answer was cut off after max_tokens" in {row["reason"] for row in rows_of(folder, "failures.jsonl")}
    prepare(load_settings(prepared, []), folder, False)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("prepare.source=null", "prepare.source is not set"),
        ("prepare.source=someone/some-chats", "could not be opened on the hub"),
        ("prepare.source=none.jsonl", "none.jsonl does not exist"),
        ("prepare.source=s3://bucket/chats.jsonl", "is an address: copy the conversations"),
        ("prepare.max_context=9999", "exceeds the 512 positions"),
        ("prepare.folder=/proc/nowhere", "set prepare.folder"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(tmp_path: Path, tiny_target: Path, override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prepare(load_settings(preset_for(tmp_path, tiny_target), [override]), None, False)


def test_a_source_is_a_path_where_it_is_written_as_one_or_lies_there(tmp_path: Path, tiny_target: Path) -> None:
    preset = tiny_preset(tmp_path, tiny_target, prepare={"source": "chats.jsonl"})
    (tmp_path / "raw").mkdir()
    assert load_settings(preset, []).prepare.source == str(tmp_path / "chats.jsonl")
    found = [
        load_settings(preset, [f"prepare.source={name}"], home=tmp_path).prepare.source
        for name in ("raw", "./new", "owner/chats", "more/chats.parquet.gz")
    ]
    assert found == [f"{tmp_path}/raw", f"{tmp_path}/new", "owner/chats", f"{tmp_path}/more/chats.parquet.gz"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["prepare.validation=0.5", "prepare.held_out=0.5"], "leave nothing for training"),
        (["prepare.via=endpoint"], "via=endpoint and endpoint.addresses belong together"),
        (["prepare.endpoint.addresses=[http://a/v1]"], "via=endpoint and endpoint.addresses belong together"),
        (
            ["prepare.via=endpoint", "prepare.endpoint.addresses=[http://me:secret@a/v1]"],
            "prepare.endpoint.addresses.0",
        ),
        (["prepare.min_p=1.5"], "prepare.min_p"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    tmp_path: Path, tiny_target: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_settings(tiny_preset(tmp_path, tiny_target), overrides)


def served(preset: Path, *servers: Server, **endpoint: Any) -> Settings:
    wanted = {"addresses": [server.address for server in servers], "attempts": 1, "concurrency": 2, **endpoint}
    overrides = [f"prepare.endpoint.{key}={json.dumps(value)}" for key, value in wanted.items()]
    return load_settings(preset, ["prepare.via=endpoint", *overrides])


def test_servers_answer_within_bounds_and_what_they_failed_is_asked_again_on_resume(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREPARE_TEST_KEY", "sk-never-written")
    preset = preset_for(tmp_path, tiny_target)
    folder = tmp_path / "prepared"

    def rude_once(number: int, body: dict[str, Any]) -> Reply:
        time.sleep(0.01)
        return (503, "sk-never-written?") if number == 3 else completion("served")

    with serving(rude_once, always(completion("served"))) as servers:
        settings = served(preset, *servers, key_variable="PREPARE_TEST_KEY")
        prepare(settings, None, False)
        assert len(answered(folder)) == 23
        assert max(server.busiest for server in servers) <= 2
        assert min(len(server.requests) for server in servers) > 3
        assert "HTTP 503" in next(row for row in rows_of(folder, "failures.jsonl") if row["row"] < 25)["reason"]
        asked = sum(len(server.requests) for server in servers)
        prepare(settings, folder, False)
        assert sum(len(server.requests) for server in servers) - asked in (
            1,
            2,
        )  # one conversation, of one or two turns
    assert len(answered(folder)) == 24
    assert answered(folder)["row-1"][1] == {"role": "assistant", "content": "served"}
    assert not any(b"sk-never-written" in file.read_bytes() for file in folder.iterdir())


def test_servers_that_answer_nobody_stop_the_job_and_what_was_answered_stays(tmp_path: Path, tiny_target: Path) -> None:
    preset = preset_for(tmp_path, tiny_target)
    with serving(lambda number, body: completion("early") if number < 3 else (500, "gone")) as servers:
        with pytest.raises(InputError, match=r"20 conversations in a row got no answer in 1 attempts.*--resume"):
            prepare(served(preset, *servers, concurrency=1), None, False)
        assert len(servers[0].requests) == 22
    with Ledger(tmp_path / "prepared", write=False) as ledger:
        assert len(ledger) > 0
    assert not (tmp_path / "prepared" / "train.jsonl").exists()


def test_answers_that_are_all_cut_off_are_no_success_and_can_still_be_kept(tmp_path: Path, tiny_target: Path) -> None:
    preset = preset_for(tmp_path, tiny_target, keep_cut=False)
    with serving(always(completion("half", "length"))) as servers:
        settings = served(preset, *servers)
        with pytest.raises(InputError, match=r"no conversation became a row.*prepare\.keep_cut=true"):
            prepare(settings, None, False)
        asked = len(servers[0].requests)
        kept = settings.prepare.model_copy(update={"keep_cut": True})
        prepare(settings.model_copy(update={"prepare": kept}), tmp_path / "prepared", False)
        assert len(servers[0].requests) == asked == 24
    assert all(row["finish"] == "length" for row in rows_of(tmp_path / "prepared", "train.jsonl"))
    assert len(answered(tmp_path / "prepared")) == 24


def wait_for_an_answer(run: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + 200
    while not (folder / LEDGER).is_file() or b"\n" not in (folder / LEDGER).read_bytes():
        assert run.poll() is None, run.communicate()[1][-3000:]
        assert time.monotonic() < deadline, "no answer appeared"
        time.sleep(0.01)


def one_by_one(folder: Path) -> tuple[str, ...]:
    """Overrides under which every conversation is a task of its own."""
    return (f"prepare.folder={folder}", "prepare.actors=1", "prepare.batch=1", "prepare.task_rows=1")


@pytest.mark.faults
def test_a_killed_preparation_resumes_and_answers_nothing_twice(prepared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    run = start(str(prepared), *one_by_one(folder))
    wait_for_an_answer(run, folder)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    with (folder / LEDGER).open("ab") as ledger:
        ledger.write(b'{"key": "half a li')  # what a kill within a write leaves
    kept = (folder / LEDGER).read_bytes().split(b"\n")[:-1]
    assert 0 < len(kept) < 24 and not (folder / "train.jsonl").exists()
    resumed = start(str(prepared), *one_by_one(folder), "--resume", str(folder))
    _, errors = resumed.communicate(timeout=280)
    assert resumed.returncode == 0, errors[-3000:]
    lines = (folder / LEDGER).read_bytes().splitlines()
    assert lines[: len(kept)] == kept
    assert len({outcome_of(line).key for line in lines}) == len(lines) == 24
    assert answered(folder) == answered(prepared.parent / "prepared")


@pytest.mark.faults
def test_a_responder_that_is_killed_is_replaced_and_its_conversations_are_answered(
    prepared: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "orphaned"
    run = start(str(prepared), *one_by_one(folder))
    wait_for_an_answer(run, folder)
    responders = [
        process
        for process in psutil.Process(run.pid).children(recursive=True)
        if "ResponderActor" in " ".join(process.cmdline())
    ]
    assert len(responders) == 1 and len((folder / LEDGER).read_bytes().splitlines()) < 24
    responders[0].kill()
    _, errors = run.communicate(timeout=280)
    assert run.returncode == 0, errors[-3000:]
    assert answered(folder) == answered(prepared.parent / "prepared")
