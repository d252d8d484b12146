"""Sweeps: which trials there are, what is refused, and one small sweep through real Ray Tune and Ray Train."""

import csv
import json
import math
import random
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from mlflow import MlflowClient
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import TrialScheduler

from actors.tracking import tracking_uri
from dspark.config import Settings
from dspark.errors import InputError
from dspark.evaluation.sweep_plots import Point, importances
from dspark.tuning import TuneSettings
from jobs.config import load_settings
from jobs.outcomes import Ledger, Outcome, to_confirm, unfinished
from jobs.search import scheduler_of
from jobs.sweep import all_failed
from jobs.sweeping import booked, check_places, plan_trials, planned_values
from jobs.trial import run_folder
from jobs.tune import tune
from tests.conftest import tiny_preset, write_conversations

SPACE: dict[str, Any] = {
    "loss.ce": {"loguniform": [0.1, 1.0]},
    "loss.gamma": {"choice": [None, 2.0]},
    "train.anchors": {"grid": [4, 8]},
}


def swept(folder: Path, target: Path, **tune_keys: Any) -> Path:
    """A preset of 12 rows in 6 steps that measures 3 validation rows every 2 steps."""
    measured = write_conversations(folder / "validation.jsonl", 3, seed=7)
    return tiny_preset(
        folder, target, rows=12,
        data={"validation": str(measured)}, validation={"every": 2}, tune={"space": SPACE, "trials": 4, **tune_keys},
    )  # fmt: skip


@pytest.fixture
def preset(tmp_path: Path, tiny_target: Path) -> Path:
    return swept(tmp_path, tiny_target)


def refusal(preset: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        plan_trials(load_settings(preset, overrides))
    return str(caught.value)


def test_trial_0_is_the_preset_and_each_draw_depends_on_its_own_key_and_number(preset: Path) -> None:
    trials = plan_trials(load_settings(preset, []))
    assert [trial.number for trial in trials] == [0, 1, 2, 3] and trials[0].values == {}
    own = load_settings(preset, [])
    assert trials[0].settings.loss == own.loss and trials[0].settings.train.anchors == own.train.anchors
    assert [trial.values["train.anchors"] for trial in trials[1:]] == [4, 8, 4]
    assert all(0.1 <= trial.settings.loss.ce <= 1.0 for trial in trials[1:])
    assert len({trial.settings.loss.ce for trial in trials}) == 4
    more = plan_trials(load_settings(preset, ["tune.space.loss.l1={uniform: [0.2, 0.4]}", "tune.trials=6"]))
    assert [trial.values["loss.ce"] for trial in more[1:4]] == [trial.values["loss.ce"] for trial in trials[1:]]


def test_grids_alone_give_every_combination_once_and_that_of_the_preset_is_trial_0() -> None:
    space = {"drafter.layers": {"grid": [1, 2]}, "drafter.block": {"grid": [4, 7]}}
    section = TuneSettings.model_validate({"space": space})
    rows = planned_values(section, 0, {"drafter.layers": 1, "drafter.block": 7})
    assert [tuple(row.values()) for row in rows] == [(), (1, 4), (2, 4), (2, 7)]


def test_a_trial_has_the_length_of_the_sweep_and_the_preset_may_name_keys_nested(preset: Path) -> None:
    values = yaml.safe_load(preset.read_text())
    values["tune"]["space"]["loss"] = {"l1": {"choice": [0.5]}}
    preset.write_text(yaml.safe_dump(values))
    trials = plan_trials(load_settings(preset, ["tune.max_steps=3"]))
    assert trials[1].values["loss.l1"] == 0.5
    assert {trial.settings.train.max_steps for trial in trials} == {3}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tune.space.loss.x1={choice: [1]}", "tune.space.loss.x1: unknown key, did you mean"),
        ("tune.space.loss.ce={uniform: [-1, 1]}", "tune.space.loss.ce: found -1"),
        ("tune.space.train.lr={choice: [fast]}", 'tune.space.train.lr: found "fast"'),
        ("tune.space.drafter.layers={uniform: [1, 4]}", "list the values with `choice` or `grid`"),
        ("tune.space.data.max_length={choice: [64]}", "tune.space.data.max_length: trials share it"),
        ("tune.space.train.global_batch={choice: [3, 5]}", "a trial with"),
        ("data.source=live_and_keep", "would have every trial write the same cache"),
        ("tune.search=optuna", "grid a choice"),
        ("tune.metric=val_loss", "is not the same number in all trials, since loss.ce varies"),
    ],
)
def test_a_sweep_that_could_only_fail_later_is_refused_with_the_full_path(
    preset: Path, override: str, message: str
) -> None:
    more = ["train.micro_batch=2"] if "global_batch" in override else []
    assert message in refusal(preset, override, *more)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ("{uniform: [1, 0]}", "ascending"),
        ("{loguniform: [0, 1]}", "no logarithm"),
        ("{uniform: [0, 1], choice: [1]}", "found uniform and choice, needed exactly one"),
        ("{choice: [1, 1]}", "names one twice"),
        ("{normal: [0, 1]}", "tune.space.loss.l1: found normal, needed exactly one of uniform, "),
    ],
)
def test_a_space_that_makes_no_sense_is_refused(preset: Path, space: str, message: str) -> None:
    assert message in refusal(preset, f"tune.space.loss.l1={space}")


@pytest.mark.skipif(find_spec("optuna") is not None, reason="optuna is installed")
def test_optuna_that_is_not_installed_is_named(preset: Path) -> None:
    only = "tune.space={loss.ce: {uniform: [0.1, 1]}}"
    assert "needs the package optuna" in refusal(preset, only, "tune.search=optuna")


def node(cpus: float, gpus: float = 0.0) -> dict[str, Any]:
    return {"Alive": True, "Labels": {}, "Resources": {"CPU": cpus, "GPU": gpus}}


def test_a_trial_that_could_never_start_is_refused_before_it_waits(preset: Path) -> None:
    settings = load_settings(preset, ["train.workers=2", "train.cpus=4", "tune.concurrent=2"])
    found = [trial.settings for trial in plan_trials(settings)]
    check_places(settings, found, [node(12), node(12)])
    with pytest.raises(InputError, match=r"train\.workers=2 needs as many places with 4 .* the cluster has 0"):
        check_places(settings, found, [node(3)] * 8)  # 24 CPUs, and no node with 4
    with pytest.raises(InputError, match=r"book 19 logical CPUs, the cluster has 12: lower tune\.concurrent"):
        check_places(settings, found, [node(12)])
    assert booked(settings, found) == {"CPU": 2 * (2 * 4 + 1) + 1, "GPU": 0}


def outcome(number: int, value: float | None, state: Any = "finished", seed: int = 1) -> Outcome:
    return Outcome(number, seed, {}, state, 4, value, curve=() if value is None else ((2, value), (4, value)))


def ledger_of(folder: Path, *outcomes: Outcome, **section: Any) -> Ledger:
    ledger = Ledger(folder, TuneSettings.model_validate({"confirm": 2, **section}))
    for one in outcomes:
        ledger.put(one)
    return ledger


def test_nan_never_wins_and_a_mean_needs_every_seed(tmp_path: Path) -> None:
    ledger = ledger_of(
        tmp_path,
        outcome(0, 1.2), outcome(1, math.nan), outcome(2, 1.5), outcome(3, 1.9, "stopped"), outcome(4, None, "failed"),
        outcome(5, math.inf), outcome(6, 1.4), outcome(2, 1.1, seed=2), outcome(6, 1.3, seed=2),
    )  # fmt: skip
    assert [one.number for one in ledger.ranked(1)] == [2, 6, 0]
    assert to_confirm(ledger, 1) == [2, 6, 0]
    assert [(score.number, round(score.mean, 3)) for score in ledger.scores([1, 2])] == [(6, 1.35), (2, 1.3)]
    read = Ledger.read(tmp_path, ledger.tune)
    assert list(read.outcomes) == list(ledger.outcomes) and read.outcomes[6, 2] == ledger.outcomes[6, 2]
    rows = list(csv.DictReader((tmp_path / "trials.csv").open()))
    assert [row["state"] for row in rows].count("finished") == 7
    smaller = ledger_of(tmp_path, outcome(0, 1.2), outcome(1, 0.7), metric="val_loss")
    assert [one.number for one in smaller.ranked(1)] == [1, 0]


def test_what_ended_is_not_made_again_and_its_rungs_are_remembered(tmp_path: Path, preset: Path) -> None:
    trials = plan_trials(load_settings(preset, []))
    ledger = ledger_of(tmp_path, outcome(0, 1.2), outcome(1, 1.0, "running"), outcome(2, 1.1, "stopped"))
    assert [one.number for one in unfinished(ledger, trials, 1)] == [1, 3]
    known = [outcome(0, 2.0), outcome(1, 1.9)]
    controller: Any = None
    for remembered, decision in ((known, TrialScheduler.STOP), ([], TrialScheduler.CONTINUE)):
        scheduler = scheduler_of(TuneSettings(reduction=2), 2, 8, remembered)
        late = TuneTrial("late", stub=True)
        scheduler.on_trial_add(controller, late)
        result = {"step": 2, "val_tau_probabilistic": 1.0}
        assert scheduler.on_trial_result(controller, late, result) == decision


def test_the_setting_that_decides_is_the_important_one() -> None:
    points = [Point(i, {"a": i % 4, "b": (7 * i) % 5}, float(i % 4), True) for i in range(16)]
    shares = importances(points, ["a", "b"])
    assert shares["a"] > 0.9 and sum(shares.values()) == pytest.approx(1)
    assert importances(points[:3], ["a", "b"]) == {}


def test_no_setting_is_important_for_what_is_noise() -> None:
    draw = random.Random(1)
    points = [Point(i, {"a": i % 4, "b": (7 * i) % 5}, draw.random(), True) for i in range(12)]
    assert importances(points, ["a", "b"]) == {}


Swept = tuple[Settings, set[str]]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, local_ray: None) -> Swept:
    """A live sweep over the preset, a rate that learns nothing, and one that makes NaN; and its actors' classes."""
    folder = tmp_path_factory.mktemp("sweep")
    space = {"train.lr": {"grid": [1e-2, 1e-9, 1e30]}}
    preset = swept(folder, tiny_target, space=space, trials=None, reduction=2, grace=4, confirm=1)
    settings = load_settings(preset, ["train.lr=1e-2", "train.clip=1e30"])
    before = set(actors())
    tune(settings, None, False)
    return settings, {name for actor, name in actors().items() if actor not in before}


def actors() -> dict[str, str]:
    """Classes of all actors that this Ray has had, by id."""
    return {key: one["ActorClassName"] for key, one in ray._private.state.actors().items()}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_best_preset_has_the_best_mean_over_two_seeds_and_trains_as_it_is(sweep: Swept) -> None:
    folder = sweep[0].output / "latest"
    result = json.loads((folder / "result.json").read_text())
    outcomes = json.loads((folder / "trials.json").read_text())["trials"]
    states = {(one["number"], one["seed"]): one["state"] for one in outcomes}
    assert states == {(0, 42): "finished", (1, 42): "stopped", (2, 42): "failed", (0, 43): "finished"}
    reached = {(one["number"], one["seed"]): (one["step"], one["value"]) for one in outcomes}
    assert [step for step, _ in reached.values()] == [6, 4, 0, 6]
    (score,) = result["scores"]
    assert score["by_seed"] == {"42": reached[0, 42][1], "43": reached[0, 43][1]}
    assert result["best"]["mean"] == pytest.approx((reached[0, 42][1] + reached[0, 43][1]) / 2)
    best = load_settings(folder / "best.yaml", [])
    assert best.train.lr == 1e-2 and result["best"]["values"] == {}
    assert (best.seed, best.tune, best.train.max_steps) == (42, TuneSettings(), None)
    assert {path.name for path in (folder / "plots").iterdir()} >= {"parallel.png", "curves.png"}
    # Weights of trials are not kept.
    assert list(folder.glob("trials/*/train")) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_run_of_a_sweep_is_a_child_with_its_true_state(sweep: Swept) -> None:
    client = MlflowClient(tracking_uri(sweep[0].tracking, sweep[0].output))
    experiment = client.get_experiment_by_name(sweep[0].tracking.experiment)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = (run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    children = {run.info.run_name: run for run in runs if run is not parent}
    assert {run.data.tags["mlflow.parentRunId"] for run in children.values()} == {parent.info.run_id}
    assert parent.info.status == "FINISHED" and children["02-seed42"].info.status == "FAILED"
    assert children["00-seed42"].info.status == "FINISHED"
    steps = [metric.step for metric in client.get_metric_history(children["00-seed42"].info.run_id, "loss")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 2
    assert children["00-seed42"].data.params["trial"] == "0"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_trial_of_a_live_sweep_loads_a_target_and_each_gives_back_what_it_booked(sweep: Swept) -> None:
    _, used = sweep
    assert "SharedTarget" in used and not [name for name in used if "TargetActor" in name]
    deadline = time.monotonic() + 20
    while ray.available_resources().get("CPU", 0.0) < ray.cluster_resources()["CPU"]:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.2)


def test_a_sweep_whose_trials_all_fail_ends_with_the_first_traceback(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path, outcome(0, None, "failed"), outcome(1, None, "failed"))
    for kind, error in ((InputError, "dspark.errors.InputError: the loss is nan"), (RuntimeError, "KeyError: 'x'")):
        text = run_folder(tmp_path, 0, 1) / "error.txt"
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text(f"Traceback (most recent call last):\n  ...\n{error}\n")
        found = all_failed(ledger, tmp_path)
        assert type(found) is kind
        assert "2 of 2 runs failed" in str(found) and str(found).endswith(text.read_text().strip())
