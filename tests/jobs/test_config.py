"""Presets, overrides and the errors they can cause."""

from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from dspark.config import Settings
from dspark.errors import InputError
from jobs.config import check_files, describe_settings, dump_settings, load_settings

PRESET = """
name: small
target: {model: smollm2-135m-instruct}
data: {conversations: rows.jsonl, held_out: ../held_out.jsonl}
drafter: {taps: [1, 3], mask_token_id: 7}
train: {lr: 6e-4}
"""


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    folder = tmp_path / "presets"
    folder.mkdir()
    file = folder / "small.yaml"
    file.write_text(PRESET, encoding="utf-8")
    return file


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def fault(preset: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load_settings(preset, overrides)
    return str(caught.value)


def test_a_preset_sets_what_it_names_and_leaves_the_rest_at_its_defaults(preset: Path) -> None:
    settings = load_settings(preset, [])
    assert settings.name == "small"
    assert settings.drafter.taps == (1, 3)
    assert settings.loss.l1 == 0.9
    assert settings.train.betas == (0.9, 0.999)


def test_a_number_with_an_exponent_and_no_dot_is_a_number(preset: Path) -> None:
    assert load_settings(preset, []).train.lr == 0.0006
    assert load_settings(preset, ["train.lr=1e-3"]).train.lr == 0.001
    assert load_settings(preset, ["train.lr=2E+0"]).train.lr == 2.0


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("loss.l1=0.5", "loss", "l1", 0.5),
        ("loss.gamma=null", "loss", "gamma", None),
        ("drafter.taps=[-1, 2, 5]", "drafter", "taps", (-1, 2, 5)),
        ("data.roles={human: user, gpt: assistant}", "data", "roles", {"human": "user", "gpt": "assistant"}),
        ("data.roles.human=user", "data", "roles", {"human": "user"}),
        ("data.thinking=false", "data", "thinking", False),
        ("ray.address=127.0.0.1:6379", "ray", "address", "127.0.0.1:6379"),
        ("tracking.uri=sqlite:///a.db?x=y", "tracking", "uri", "sqlite:///a.db?x=y"),
        ("tracking.experiment='1e-3'", "tracking", "experiment", "1e-3"),
    ],
)
def test_an_override_takes_its_value_from_yaml(
    preset: Path, override: str, section: str, key: str, value: object
) -> None:
    assert getattr(getattr(load_settings(preset, [override]), section), key) == value


def test_of_two_overrides_of_a_key_the_later_wins(preset: Path) -> None:
    assert load_settings(preset, ["seed=1", "seed=2"]).seed == 2


def test_an_override_of_one_key_keeps_its_neighbours(preset: Path) -> None:
    drafter = load_settings(preset, ["drafter.layers=2"]).drafter
    assert (drafter.layers, drafter.mask_token_id) == (2, 7)


def test_a_key_given_twice_is_refused_with_its_line(preset: Path) -> None:
    preset.write_text("seed: 1\nname: a\nseed: 2\n", encoding="utf-8")
    message = fault(preset)
    assert "key `seed` is given twice" in message
    assert "line 3" in message


def test_a_key_given_twice_inside_a_section_is_refused(preset: Path) -> None:
    preset.write_text(PRESET + "loss:\n  l1: 1\n  l1: 2\n", encoding="utf-8")
    assert "key `l1` is given twice" in fault(preset)


def test_a_key_that_is_no_text_is_refused(preset: Path) -> None:
    assert "this key is no text" in fault(preset, "data.roles={yes: user}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss.l2=1", "loss.l2: unknown key, did you mean loss.l1?"),
        ("lr=1", "lr: unknown key, did you mean train.lr?"),
        ("train.lerning_rate=1", "train.lerning_rate: unknown key, did you mean"),
        ("los={l1: 1}", "los: unknown key, did you mean loss?"),
        ("ray.zzzzzz=1", "ray.zzzzzz: unknown key, known here: ray.address, ray.dashboard_port, ray.object_store_mb"),
    ],
)
def test_an_unknown_key_is_refused_with_its_path_and_the_nearest_key(preset: Path, override: str, message: str) -> None:
    assert message in fault(preset, override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr=fast", 'train.lr: found "fast", needed a valid number'),
        ("seed='3'", 'seed: found "3", needed a valid integer'),
        ("seed=1.5", "seed: found 1.5, needed a valid integer"),
        ("drafter.confidence=1", "drafter.confidence: found 1, needed a valid boolean"),
        ("train.zero_stage=7", "train.zero_stage: found 7, needed 0, 1, 2 or 3"),
        ("target.dtype=fp16", "target.dtype: found \"fp16\", needed 'auto', 'fp32' or 'bf16'"),
        ("drafter.taps=[1, x]", 'drafter.taps.1: found "x", needed a valid integer'),
        ("loss=0.5", "loss: found 0.5, needed an object"),
        ("train.workers=0", "train.workers: found 0, needed greater than or equal to 1"),
        ("name=a/b", 'name: found "a/b", needed to match pattern'),
        ("tracking.model_name=12", "tracking.model_name: found 12, needed a valid string"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path_and_what_is_needed(preset: Path, override: str, message: str) -> None:
    assert message in fault(preset, override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafter.markov_rank=0", "drafter: confidence_with_markov=true needs markov_rank > 0"),
        ("drafter.init=target drafter.start_from=x", "drafter: start_from is set"),
        ("train.global_batch=3 train.micro_batch=2", "train: global_batch=3 is no multiple"),
        ("loss.confidence=0", "drafter.confidence=true needs loss.confidence > 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(preset: Path, override: str, message: str) -> None:
    assert message in fault(preset, *override.split())


EAGLE3 = PRESET.replace("mask_token_id: 7", "kind: eagle3")


def test_a_kind_has_its_own_keys_and_a_dump_shows_no_others(preset: Path) -> None:
    preset.write_text(EAGLE3, encoding="utf-8")
    settings = load_settings(preset, ["eagle3.ttt_length=5", "drafter.block=4"])
    assert (settings.eagle3.ttt_length, settings.eagle3.step_loss_decay, settings.drafter.block) == (5, 0.8, 4)
    values = settings.model_dump(mode="json")
    assert "loss" not in values and "anchors" not in values["train"]
    assert values["drafter"].keys() == {"kind", "block", "taps", "family", "start_from", "vocab"}
    assert values["eagle3"]["ttt_length"] == 5
    preset.write_text(PRESET, encoding="utf-8")
    other = load_settings(preset, []).model_dump(mode="json")
    assert "eagle3" not in other and "loss" in other and "markov_rank" in other["drafter"]


def test_dumped_settings_of_eagle3_are_read_back_equal(preset: Path, tmp_path: Path) -> None:
    preset.write_text(EAGLE3, encoding="utf-8")
    settings = load_settings(preset, ["eagle3.mask_alignment=published"])
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_settings(settings), encoding="utf-8")
    assert load_settings(copy, []) == settings


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        (PRESET, "eagle3.ttt_length=3", "drafter.kind=dspark has no eagle3: leave them out"),
        (PRESET, "drafter.kind=eagle3", "drafter.kind=eagle3 has no drafter.mask_token_id: leave them out"),
        (EAGLE3, "drafter.layers=1", "has no drafter.layers"),
        (EAGLE3, "drafter.markov_rank=0", "has no drafter.markov_rank"),
        (EAGLE3, "drafter.init=random", "has no drafter.init"),
        (EAGLE3, "loss.l1=0.9", "has no loss"),
        (EAGLE3, "train.anchors=512", "has no train.anchors"),
        (EAGLE3, "eagle3.step_loss_decay=0", "eagle3.step_loss_decay: found 0"),
        (EAGLE3, "drafter.kind=medusa", "drafter.kind: found"),
    ],
)
def test_what_a_kind_has_no_use_for_is_refused_whatever_its_value(
    preset: Path, text: str, override: str, message: str
) -> None:
    preset.write_text(text, encoding="utf-8")
    assert message in fault(preset, override)


def test_all_faults_are_listed_in_one_error(preset: Path) -> None:
    message = fault(preset, "train.lr=fast", "sed=1", "drafter.block=0")
    assert "has 3 faults" in message
    assert all(path in message for path in ("\n  train.lr:", "\n  sed:", "\n  drafter.block:"))


def test_a_missing_key_is_named(preset: Path) -> None:
    preset.write_text(PRESET.replace("mask_token_id: 7", ""), encoding="utf-8")
    assert "drafter.mask_token_id: missing" in fault(preset)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "holds nothing"), ("- a\n- b\n", "keys and values"), ("a: [1\n", "is no valid YAML")],
)
def test_a_file_that_is_no_preset_is_refused(preset: Path, text: str, message: str) -> None:
    preset.write_text(text, encoding="utf-8")
    assert message in fault(preset)


def test_a_preset_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "none.yaml") in fault(tmp_path / "none.yaml")


@pytest.mark.parametrize("override", ["seed", "=3", "loss.=3", ".l1=3"])
def test_an_override_without_key_and_value_is_refused(preset: Path, override: str) -> None:
    assert f"override `{override}` needs the form key=value" in fault(preset, override)


def test_an_override_whose_value_is_no_yaml_is_refused(preset: Path) -> None:
    assert "override `target.model=@x`: the value is no valid YAML" in fault(preset, "target.model=@x")


def test_paths_start_where_they_were_written(preset: Path, home: Path) -> None:
    settings = load_settings(preset, ["evaluate.benchmarks=bench", "drafter.start_from=old"])
    assert settings.data.conversations == preset.parent / "rows.jsonl"
    assert settings.data.held_out == preset.parent.parent / "held_out.jsonl"
    assert settings.evaluate.benchmarks == home / "bench"
    assert settings.drafter.start_from == home / "old"
    assert load_settings(preset, ["data.conversations=rows.jsonl"]).data.conversations == home / "rows.jsonl"
    assert load_settings(preset, ["data={conversations: a, held_out: b}"]).data.held_out == home / "b"


def test_output_lies_under_the_working_directory_whoever_sets_it(preset: Path, home: Path, tmp_path: Path) -> None:
    assert load_settings(preset, []).output == home / "runs"
    assert load_settings(preset, [], home=tmp_path).output == tmp_path / "runs"
    preset.write_text(PRESET + "output: mine\n", encoding="utf-8")
    assert load_settings(preset, []).output == home / "mine"
    assert load_settings(preset, ["output=/elsewhere"]).output == Path("/elsewhere")


def test_a_tilde_is_the_users_home(preset: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/users/me")
    settings = load_settings(preset, ["data.held_out=~/h.jsonl", "output=~/runs", "target.model=~/target"])
    assert settings.data.held_out == Path("/users/me/h.jsonl")
    assert settings.output == Path("/users/me/runs")
    assert settings.target.model == "/users/me/target"


def test_a_target_is_a_path_only_when_it_is_written_as_one(preset: Path, home: Path) -> None:
    assert load_settings(preset, ["target.model=org/name"]).target.model == "org/name"
    assert load_settings(preset, ["target.model=./name"]).target.model == str(home / "name")


def test_every_missing_file_is_named_with_its_key(preset: Path, home: Path) -> None:
    settings = load_settings(preset, ["evaluate.benchmarks=bench", "drafter.start_from=old"])
    with pytest.raises(InputError) as caught:
        check_files(settings)
    for key, path in [
        ("data.conversations", settings.data.conversations),
        ("data.held_out", settings.data.held_out),
        ("evaluate.benchmarks", home / "bench"),
        ("drafter.start_from", home / "old"),
    ]:
        assert key in str(caught.value)
        assert str(path) in str(caught.value)


def test_files_that_are_there_pass(preset: Path, home: Path) -> None:
    settings = load_settings(preset, ["evaluate.benchmarks=."])
    settings.data.conversations.touch()
    settings.data.held_out.touch()
    check_files(settings)


@hypothesis.settings(max_examples=50)
@hypothesis.example(experiment="\x85", lr=1.0, seed=0, gamma=None)  # a line break to YAML
@hypothesis.given(
    experiment=st.text(max_size=12),
    lr=st.floats(1e-12, 1e6, exclude_min=True),
    seed=st.integers(0, 10**30),
    gamma=st.none() | st.floats(1e-9, 1e9),
)
def test_dumped_settings_are_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, experiment: str, lr: float, seed: int, gamma: float | None
) -> None:
    folder = tmp_path_factory.mktemp("dump")
    (folder / "preset.yaml").write_text(PRESET, encoding="utf-8")
    before = load_settings(folder / "preset.yaml", [])
    plain = before.model_dump()
    plain["tracking"]["experiment"] = experiment
    plain["train"]["lr"] = lr
    plain["seed"] = seed
    plain["loss"]["gamma"] = gamma
    settings = Settings.model_validate(plain)
    (folder / "dump.yaml").write_text(dump_settings(settings), encoding="utf-8")
    assert load_settings(folder / "dump.yaml", []) == settings


@pytest.mark.parametrize("text", ["1e-3", "12", "true", "null", "2024-01-01", "a: b", "~", "é"])
def test_text_that_looks_like_something_else_stays_text_in_a_dump(preset: Path, text: str) -> None:
    settings = load_settings(preset, [f"tracking.experiment='{text}'"])
    preset.write_text(dump_settings(settings), encoding="utf-8")
    assert load_settings(preset, []).tracking.experiment == text


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql://me:p@ss/word@db/runs", "postgresql://me:***@db/runs"),
        ("https://host:5000/path", "https://host:5000/path"),
        ("https://me:x@host:5000", "https://me:***@host:5000"),
        ("https://host/?user=me&password=abc&x=1", "https://host/?user=me&password=***&x=1"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
    ],
)
def test_a_dump_shows_no_password(preset: Path, uri: str, shown: str) -> None:
    settings = load_settings(preset, [f"tracking.uri='{uri}'"])
    assert settings.tracking.uri == uri
    preset.write_text(dump_settings(settings), encoding="utf-8")
    assert load_settings(preset, []).tracking.uri == shown


def test_every_setting_is_described_once_with_its_default() -> None:
    described = {key: default for key, default, _ in describe_settings()}
    assert len(described) == len(list(describe_settings()))
    assert described["loss.l1"] == "0.9"
    assert described["name"] == "(required)"
    assert described["data.roles"] == "{}"


@pytest.mark.parametrize("key", ["output", "prepare.folder", "data.conversations", "evaluate.benchmarks"])
def test_an_address_is_no_path(preset: Path, key: str) -> None:
    assert f"{key}: 's3://bucket/x' is an address, needed is a path" in fault(preset, f"{key}=s3://bucket/x")
    assert load_settings(preset, ["cache.folder=s3://bucket/x"]).cache.folder == "s3://bucket/x"


def test_a_device_map_names_only_gpus_that_a_target_actor_books(preset: Path) -> None:
    here = load_settings(preset, ["target.device_map={model: 0, lm_head: 1}", "targets.gpus=2"])
    assert here.target.device_map == {"model": 0, "lm_head": 1}
    assert load_settings(preset, ["target.device_map=auto"]).target.device_map == "auto"
    assert "GPU 1, and an actor with targets.gpus=1" in fault(
        preset, "target.device_map={model: 0, lm_head: 1}", "targets.gpus=1"
    )
    assert "target.device_map" in fault(preset, "target.device_map=everywhere")
