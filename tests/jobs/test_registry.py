"""Registered drafters: two versions of one target, measured in one evaluation, and the gate between them."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlflow.entities.model_registry import ModelVersion
from mlflow.models import Model

from actors.registry import CHAMPION, Registry, parse_reference
from dspark.errors import InputError
from dspark.evaluation.recorded import recorded_in
from dspark.target_files import fingerprint
from jobs import cli
from jobs.checkpoints import local_checkpoint, with_local_start
from jobs.register import register
from tests.jobs.registered import (
    drafters,
    echoing_target,
    evaluation_run,
    measured_otherwise,
    preset_of,
    read,
    trained_run,
)

Dspark = Callable[..., tuple[int, str, str]]


@dataclass(frozen=True)
class Shop:
    """A store with the model `tiny`: version 1 guesses, version 2 echoes as its target; one run measured both."""

    preset: Path
    target: Path
    uri: str
    folders: dict[int, Path]
    evaluation: Path
    runs: dict[int, str]

    @property
    def registry(self) -> Registry:
        return Registry(self.uri)

    def version(self, number: int) -> ModelVersion:
        return self.registry.client.get_model_version("tiny", str(number))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    folder = tmp_path_factory.mktemp("registry")
    target = echoing_target(folder / "target")
    preset = preset_of(folder, target)
    settings = read(preset)
    runs = {number: trained_run(settings, drafter) for number, drafter in enumerate(drafters(target), 1)}
    folders = {number: run.drafter for number, run in runs.items()}
    evaluation = evaluation_run(settings, {"guessing": folders[1], "echoing": folders[2]})
    for number, path in folders.items():
        assert register(path, "tiny", evaluation, None, False) == number
    ids = {number: run.tracker.run_id for number, run in runs.items()}
    return Shop(preset, target, runs[1].tracker.uri, folders, evaluation, ids)


@pytest.fixture
def dspark(shop: Shop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Dspark:
    """The command line against the shop: exit code, standard output and standard error, lines joined."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", shop.uri)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dspark", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, " ".join(said.out.split()), " ".join(said.err.split())

    return call


def test_a_version_says_what_it_is_what_it_is_worth_and_which_run_made_it(shop: Shop, tmp_path: Path) -> None:
    version = shop.version(2)
    assert version.run_id == version.tags["trained_by"] == shop.runs[2]
    assert version.tags["target_fingerprint"] == fingerprint(shop.target)
    assert version.tags["drafter_fingerprint"] == fingerprint(shop.folders[2])
    assert {"target", "data_fingerprint", "settings_hash", "git_commit", "steps"} <= version.tags.keys()
    assert version.tags["acceptance_definition"].startswith("Tokens kept per round")
    found = recorded_in(version.tags)
    assert found is not None and found.lossless and found.compared == 4 + 5
    result = json.loads((shop.evaluation / "result.json").read_text())["drafters"]["echoing"]
    measured = result["benchmarks"]["t0"]["by_domain"]["gsm8k"]["acceptance_length"]
    assert found.lengths["t0.gsm8k"] == pytest.approx(measured, abs=1e-6)
    assert {"t0.held_out", "t0.held_out.math", "t0.mt-bench", "t0.mean_math", "t1.held_out"} <= found.lengths.keys()

    stored = Path(shop.registry.client.download_artifacts(shop.runs[2], "drafter", str(tmp_path)))
    (folder,) = stored.iterdir()
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "settings.yaml", "result.json"} <= names
    card = (folder / "README.md").read_text()
    assert "acceptance length" in card and "benchmarks, T=0, gsm8k" in card
    signature = Model.load(str(folder / "MLmodel")).signature
    assert [spec.name for spec in signature.inputs.inputs] == ["anchor_ids", "anchor_positions", "context_taps"]
    assert [spec.shape for spec in signature.outputs.inputs] == [(-1, 4), (-1, 4)]


def test_the_gate_refuses_the_worse_version_and_a_rollback_knows_the_champion_before(
    shop: Shop, dspark: Dspark
) -> None:
    assert dspark("registry", "promote", "tiny", "2", "--dry-run")[0] == 0
    assert shop.registry.aliases("tiny") == {}
    code, said, _ = dspark("registry", "promote", "tiny", "2")
    assert code == 0 and "models:/tiny/2 is the champion, the first champion" in said

    before = {**shop.version(1).tags}
    code, said, error = dspark("registry", "promote", "tiny", "1", "--benchmark", "gsm8k")
    assert code == 2 and "too short" in said
    assert "models:/tiny/1 is not promoted: acceptance length on t0.gsm8k is 1." in error
    assert "the champion's (models:/tiny/2) is" in error and "--margin" in error
    # A margin wider than the difference lets it pass, at first without touching anything.
    wide = ("registry", "promote", "tiny", "1", "--benchmark", "gsm8k", "--margin", "5")
    assert dspark(*wide, "--dry-run")[0] == 0
    assert shop.registry.aliases("tiny") == {CHAMPION: 2} and shop.version(1).tags == before
    assert dspark(*wide)[0] == 0
    assert shop.registry.aliases("tiny") == {CHAMPION: 1}

    assert dspark("registry", "rollback", "tiny", "--dry-run")[0] == 0
    assert shop.registry.aliases("tiny") == {CHAMPION: 1}
    code, said, _ = dspark("registry", "rollback", "tiny")
    assert code == 0 and "models:/tiny/2 is the champion again" in said
    assert shop.registry.aliases("tiny") == {CHAMPION: 2}
    lines = shop.version(2).tags["history"].splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        "promoted: the first champion", "champion again, rolled back from version 1",
    ]  # fmt: skip
    code, _, error = dspark("registry", "rollback", "tiny")
    assert code == 2 and "no champion of tiny before version 2 is recorded" in error


def test_versions_are_listed_as_numbers_and_compared_side_by_side(shop: Shop, dspark: Dspark) -> None:
    client = shop.registry.client
    client.create_registered_model("many")
    source = shop.version(1).source
    assert source is not None
    for _ in range(11):
        client.create_model_version("many", source=source, run_id=shop.runs[1])
    code, said, _ = dspark("registry", "list", "many")
    numbers = [int(line.split()[0]) for line in said.split("many ")[1:]]
    assert code == 0 and numbers == list(range(1, 12))
    assert [entry.version for entry in shop.registry.entries("many")] == numbers
    # Nothing is recorded of these, so none of them gets through.
    code, _, error = dspark("registry", "promote", "many", "10")
    assert code == 2 and "dspark registry record many 10 RUN" in error

    code, said, _ = dspark("registry", "compare", "tiny", "2", "1")
    own, other = (shop.version(number).tags["acceptance_length.t0.gsm8k"] for number in (2, 1))
    assert code == 0 and f"* acceptance_length.t0.gsm8k {own} {other}" in said
    assert "* target" not in said and f"models:/tiny/1 came from the run {shop.runs[1]}" in said


def test_an_evaluation_of_other_prompts_is_no_ground_for_a_promotion_until_both_have_it(
    shop: Shop, dspark: Dspark, tmp_path: Path
) -> None:
    name = "longer"
    for number in (1, 2):
        register(shop.folders[number], name, shop.evaluation, None, False)
    assert dspark("registry", "promote", name, "1")[0] == 0
    shorter = measured_otherwise(shop.evaluation, tmp_path / "shorter", "evaluate.max_new_tokens", 8)
    tags = shop.registry.entry(name, "2").tags
    assert dspark("registry", "record", name, "2", str(shorter), "--dry-run")[0] == 0
    assert shop.registry.entry(name, "2").tags == tags
    assert dspark("registry", "record", name, "2", str(shorter))[0] == 0
    code, _, error = dspark("registry", "promote", name, "2")
    assert code == 2 and "evaluate.max_new_tokens was 8 and 16" in error
    assert dspark("registry", "record", name, CHAMPION, str(shorter))[0] == 0
    assert dspark("registry", "promote", name, "2")[0] == 0
    # A version is measured by an evaluation of its own weights alone.
    description = json.loads((shorter / "evaluation.json").read_text())
    del description["drafter echoing"]
    (shorter / "evaluation.json").write_text(json.dumps(description))
    code, _, error = dspark("registry", "record", name, "2", str(shorter))
    assert code == 2 and f"not the drafter with the fingerprint {fingerprint(shop.folders[2])}" in error


def test_a_registered_drafter_stands_wherever_a_folder_may(shop: Shop, dspark: Dspark, tmp_path: Path) -> None:
    common = ("--target", str(shop.target), "--max-new-tokens", "12")
    answers = [dspark("generate", str(place), "the cat", *common) for place in (shop.folders[2], "models:/tiny/2")]
    assert [code for code, _, _ in answers] == [0, 0]
    # An echo accepts whole blocks, a guess none: it is that drafter which answered.
    assert [error.split("acceptance length ")[1][0] for _, _, error in answers] in (["4"] * 2, ["5"] * 2, ["3"] * 2)
    (copy,) = (tmp_path / "cache" / "dspark" / "registry").glob("*/tiny-2")
    assert fingerprint(copy) == fingerprint(shop.folders[2])
    assert [path.name for path in copy.parent.iterdir()] == ["tiny-2"]  # nothing half done beside it

    code, said, _ = dspark("evaluate", str(shop.preset), "models:/tiny/1", "models:/tiny/2", "--dry-run")
    assert code == 0 and f"drafter tiny-2: {copy}" in said and "drafter tiny-1: " in said
    code, said, error = dspark("export", "models:/tiny/2", str(tmp_path / "out"), "--to", "deepspec")
    assert code == 0, error
    assert "benchmarks, T=0, gsm8k" in (tmp_path / "out" / "README.md").read_text()
    settings = with_local_start(read(shop.preset, "drafter.start_from=models:/tiny/2"))
    assert settings.drafter.start_from == copy
    assert local_checkpoint(tmp_path) == tmp_path


def test_a_registered_drafter_is_looked_for_in_the_store_that_the_command_names(
    shop: Shop, dspark: Dspark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")
    name, there = "models:/tiny/2", ("--uri", shop.uri)
    code, said, error = dspark("register", name, "--name", "again", "--dry-run", *there)
    assert code == 0 and shop.runs[2] in said, error
    code, said, error = dspark("export", name, str(tmp_path / "out"), "--to", "deepspec", "--dry-run", *there)
    assert code == 0 and "tiny-2" in said, error
    answer = ("generate", name, "the cat", "--target", str(shop.target), "--max-new-tokens", "4")
    assert dspark(*answer, *there)[0] == 0
    code, _, error = dspark(*answer)
    assert code == 2 and "none.db cannot be opened" in error and not (tmp_path / "none.db").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("models:/tiny", "'models:/tiny' names no registered drafter: needed is models:/NAME@ALIAS or"),
        ("models:/tiny/latest", "'models:/tiny/latest' names no registered drafter"),
        ("models:/../../x/1", "names no registered drafter"),
        ("models:/tini@champion", "there is no registered model 'tini' in sqlite:///"),
        ("models:/tiny@winner", "tiny has no version 'winner' in"),
        ("models:/tiny/12", "tiny has no version '12' in"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_with_what_there_is(
    shop: Shop, dspark: Dspark, name: str, message: str
) -> None:
    code, _, error = dspark("generate", name, "x", "--target", str(shop.target))
    assert code == 2 and message in error
    if "'1" in message or "winner" in message:
        assert "which holds 1, 2" in error


def test_files_that_are_not_those_that_were_registered_are_refused_and_leave_no_copy(
    shop: Shop, dspark: Dspark, tmp_path: Path
) -> None:
    registry = shop.registry
    version = registry.add(
        "odd", [shop.folders[1] / "config.json"], {}, {"drafter_fingerprint": "f" * 32}, shop.runs[1]
    )
    assert version == 1
    with pytest.raises(InputError, match=rf"have the fingerprint \w+, registered was {'f' * 32}"):
        registry.copy_of(parse_reference("models:/odd/1"))
    assert list((tmp_path / "cache").rglob("*odd-1*")) == []


def test_what_is_no_evaluation_of_the_drafter_or_no_store_is_refused_before_anything_is_made(
    shop: Shop, dspark: Dspark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("evaluation.json", "result.json", "results.jsonl"):
        (broken / name).write_text((shop.evaluation / name).read_text())
    lines = (broken / "results.jsonl").read_text().splitlines(keepends=True)
    (broken / "results.jsonl").write_text("".join(lines[:-1]))
    given = ("register", str(shop.folders[2]), "--name", "fresh")
    for evaluation, message in ((tmp_path, "holds no evaluation.json"), (broken, "are not of one evaluation")):
        code, _, error = dspark(*given, "--evaluation", str(evaluation))
        assert code == 2 and message in error
    assert dspark("register", str(shop.folders[2]), "--name", "../up")[0] == 2
    code, said, _ = dspark(*given, "--evaluation", str(shop.evaluation), "--dry-run")
    assert code == 0 and "9 of 9 in fp32" in said and shop.runs[2] in said
    assert "fresh" not in shop.registry.names()
    code, _, error = dspark("registry", "list", "--uri", f"sqlite:///{tmp_path}/none.db")
    assert code == 2 and "there is no such file" in error and not (tmp_path / "none.db").exists()
