"""Training through real Ray, Ray Data, Ray Train and DeepSpeed, on a tiny target."""

import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from safetensors.torch import load

from actors.checkpoint_files import DRAFTER, SPARE, newest_checkpoint, progress_of, read_file, settle_storage
from actors.gauges import MEASURES, exported
from actors.retention import LEDGER, PROGRESS, SNAPSHOT, best_checkpoint
from dspark.config import Settings
from dspark.errors import InputError
from dspark.evaluation.model_card import Licences
from dspark.model.exchange import read_checkpoint
from dspark.target_files import fingerprint
from jobs.config import load_settings
from jobs.export import export
from jobs.train import train
from tests.conftest import tiny_preset, write_conversations
from tests.endpoint import Endpoint
from tests.jobs.conftest import PlainRun
from tests.jobs.runs import assert_each_row_once, values

pytestmark = pytest.mark.usefixtures("local_ray")


def test_every_row_is_trained_and_the_last_step_is_filled_with_rows_without_weight(plain_run: PlainRun) -> None:
    assert len(plain_run.losses) == 2 * 17  # 33 rows in steps of 2
    counts = values(plain_run.folder, "anchors_used")
    assert len(counts) == 34 and all(0 < count <= 8 for count in counts)
    assert plain_run.losses[-1] < plain_run.losses[0]
    assert_each_row_once(plain_run.folder, 2 * 33)


def test_both_sides_of_the_stream_say_what_share_of_their_time_they_waited(plain_run: PlainRun) -> None:
    trainers = values(plain_run.folder, "waiting_share")
    assert len(trainers) == 34 and all(0 <= share <= 1 for share in trainers)
    targets = values(plain_run.folder, "targets_waiting_share")
    assert 1 <= len(targets) <= 10 and all(0 <= share < 1 for share in targets)  # five windows an epoch


def test_two_ranks_and_zero_3_change_neither_losses_nor_gradient_norms(plain_run: PlainRun, tmp_path: Path) -> None:
    changes = ["train.workers=2", "train.zero_stage=3", "targets.actors=2"]
    settings = load_settings(plain_run.preset, [f"output={tmp_path}", *changes])
    train(settings, None, False)
    folder = (tmp_path / "latest").resolve()
    assert values(folder, "loss") == pytest.approx(plain_run.losses, rel=1e-4)
    norms = values(plain_run.folder, "grad_norm")
    assert min(norms) > 0
    assert values(folder, "grad_norm") == pytest.approx(norms, rel=1e-3)
    # Of all stages this one cannot be dealt anew.
    alone = load_settings(plain_run.preset, [f"output={tmp_path}", "train.zero_stage=3"])
    with pytest.raises(InputError, match=r"made by 2 ranks, this run has train\.workers=1, and a universal checkpoint"):
        train(alone, folder, False)


@pytest.fixture(scope="module")
def followed(plain_run: PlainRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, str, Endpoint]:
    """A run from the target's own layers and bigrams, measured as it goes on; what it printed, and what it exported."""
    output = tmp_path_factory.mktemp("followed")
    changes = ["drafter.init=target", "drafter.vocab=null", "evaluate.every=8", "evaluate.prompts_t0=2"]
    settings = load_settings(plain_run.preset, [f"output={output}", *changes])
    with redirect_stdout(io.StringIO()) as printed, Endpoint() as endpoint:
        train(settings, None, False)
    return settings, " ".join(printed.getvalue().split()), endpoint


def test_a_drafter_of_all_tokens_that_starts_from_the_target_begins_elsewhere_and_learns_too(
    followed: tuple[Settings, str, Endpoint], plain_run: PlainRun
) -> None:
    curve = values(followed[0].output / "latest", "loss")
    assert curve[0] != pytest.approx(plain_run.losses[0], rel=1e-2)
    assert curve[-1] < curve[0]


def test_an_evaluator_measures_newest_drafters_into_the_run_and_skips_what_it_is_too_slow_for(
    followed: tuple[Settings, str, Endpoint],
) -> None:
    settings, printed, _ = followed
    record = json.loads((settings.output / "latest" / "run.json").read_text())
    history = MlflowClient(record["mlflow_uri"]).get_metric_history(record["mlflow_run_id"], "eval_acceptance_length")
    found = {entry.step: entry.value for entry in history}
    assert found and set(found) <= {8, 16, 24, 32}
    assert f"measured at {len(found)} steps while training, {4 - len(found)} more were skipped" in printed
    assert all(1 <= length <= settings.drafter.block + 1 for length in found.values())


def test_numbers_of_a_run_are_at_the_metrics_endpoint_under_its_name(followed: tuple[Settings, str, Endpoint]) -> None:
    settings, _, endpoint = followed
    # All but what evaluators decode.
    names = {exported(name) for name in MEASURES if "decode" not in name}
    assert endpoint.found.keys() >= names
    label = f'run="{(settings.output / "latest").resolve().name}"'
    assert [name for name in names if label not in endpoint.found[name]] == []
    assert {f'slot="{slot}"' for slot in range(settings.drafter.block)} <= endpoint.found["ray_dspark_accept_rate"]
    assert any(label.startswith("dataset=") for label in endpoint.found["ray_data_current_bytes"])


def test_what_a_kill_in_mid_save_leaves_is_never_loaded_and_cleared(plain_run: PlainRun, tmp_path: Path) -> None:
    storage = tmp_path / "train"
    shutil.copytree(plain_run.folder / "train", storage)
    snapshot = (storage / SNAPSHOT).read_text()
    (storage / SPARE).write_text(snapshot)
    (storage / SNAPSHOT).write_text(snapshot[: len(snapshot) // 2])
    (storage / "step-00000099").mkdir()
    (storage / "step-00000099" / DRAFTER).write_text("half")
    settle_storage(storage)
    assert sorted(path.name for path in storage.glob("step-*")) == ["step-00000030", "step-00000034"]
    checkpoint = newest_checkpoint(storage)
    assert checkpoint is not None and progress_of(checkpoint)["step"] == 34
    # The target's frozen tensors are not in it.
    assert not {"embed_tokens.weight", "lm_head.weight"} & load(read_file(checkpoint, DRAFTER)).keys()


BEST, LAST, PATIENCE = 1, 2, 3


@pytest.fixture(scope="module")
def validated(plain_run: PlainRun, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A run that begins with the drafter of the plain one and whose rate is far too high, until validation ends it."""
    folder = tmp_path_factory.mktemp("validated")
    exported = folder / "exported"
    export(plain_run.folder / "drafter", exported, "speculators", None, None, Licences(), None, False)
    rows = write_conversations(folder / "validation.jsonl", 5, seed=3)
    kept = {"checkpoint_every": 1, "keep_best": BEST, "keep_last": LAST, "storage": f"file://{folder / 'remote'}"}
    changes: dict[str, Any] = {
        "data": {"validation": str(rows)},
        "drafter": {"start_from": str(exported)},
        "train": {"workers": 2, "zero_stage": 2, "ema": 0.5, "lr": 0.3, "clip": 1e9, **kept},
        "validation": {"every": 1, "patience": PATIENCE, "metric": "loss"},
    }
    settings = load_settings(tiny_preset(folder, Path(plain_run.settings.target.model), **changes), [])
    train(settings, None, False)
    return settings


def storage_of(settings: Settings) -> str:
    return f"{settings.train.storage}/{(settings.output / 'latest').resolve().name}"


def test_validation_decides_when_to_stop_and_which_checkpoint_is_exported(validated: Settings) -> None:
    folder = (validated.output / "latest").resolve()
    history = values(folder, "val_loss")
    best = history.index(min(history)) + 1
    assert len(history) == best + PATIENCE < 17
    assert len(values(folder, "val_accept_rate_0")) == len(history)
    kept = best_checkpoint(storage_of(validated), "val_loss", smaller=True)
    assert kept is not None and progress_of(kept)["step"] == best
    assert read_checkpoint(folder / "drafter").facts["steps"] == best
    assert_each_row_once(folder, 2 * len(history))
    train(validated, folder, False)
    assert values(folder, "val_loss") == history


def test_the_best_and_several_of_the_newest_checkpoints_stay_whole(validated: Settings) -> None:
    history = values(validated.output / "latest", "val_loss")
    steps = range(1, len(history) + 1)
    stay = {*sorted(steps, key=lambda step: history[step - 1])[:BEST], *steps[-LAST:]}
    found = {path.name: path for path in Path(storage_of(validated).removeprefix("file://")).glob("step-*")}
    assert set(found) == {f"step-{step:08d}" for step in steps}
    for step in steps:
        files = {path.name for path in found[f"step-{step:08d}"].iterdir()}
        assert {LEDGER, DRAFTER, "deepspeed"} < files if step in stay else files == {PROGRESS}, step
    assert len(stay) < len(steps)


def test_a_drafter_that_starts_from_another_one_goes_on_where_that_ended(
    validated: Settings, plain_run: PlainRun
) -> None:
    assert values(validated.output / "latest", "loss")[0] < plain_run.losses[0]
    exported = validated.drafter.start_from
    assert exported is not None
    made = read_checkpoint(validated.output / "latest" / "drafter").facts
    assert made["start_from"] == fingerprint(exported)
    checkpoint = newest_checkpoint(storage_of(validated))
    assert checkpoint is not None
    assert progress_of(checkpoint)["identity"]["drafter.start_from"] == fingerprint(exported)
    other = load_settings(plain_run.preset, [f"drafter.start_from={exported}", "drafter.taps=[1,2,4]"])
    with pytest.raises(InputError, match=r"drafter\.taps is \(1, 2, 4\), the checkpoint has \(0, 2, 4\)"):
        train(other, None, True)


def test_rows_that_are_trained_cannot_validate(plain_run: PlainRun) -> None:
    conversations = plain_run.settings.data.conversations
    settings = load_settings(plain_run.preset, [f"data.validation={conversations}", "validation.every=5"])
    with pytest.raises(InputError, match=r"33 of the 33 rows of data\.validation.*are training rows too"):
        train(settings, None, True)
