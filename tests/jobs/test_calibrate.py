"""Calibration and simulation as a user runs them: a tiny target, a drafter with a confidence head, real Ray."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient

from dspark.config import Settings
from dspark.decoding.calibration import VerifiedRound, half_of
from dspark.decoding.calibration_file import Calibration, load_calibration, save_calibration
from dspark.decoding.schedule import StepRates
from dspark.errors import InputError
from dspark.evaluation.benchmarks import EvaluationPrompt
from dspark.model.checkpoints import save_drafter
from jobs.calibrate import calibrate, dataset_of
from jobs.calibrating import Recorded, read_rounds, write_rounds
from jobs.config import load_settings
from jobs.rows import PromptRows
from jobs.simulate import simulate
from tests.conftest import tiny_preset
from tests.dspark.decoding.decoders import BLOCK, tiny_target, trained_drafter
from tests.dspark.folders import TARGET, save, save_eagle3
from tests.dspark.small import small_config

PNG = b"\x89PNG"
ALL_PROMPTS = ["evaluate.prompts_t0=6", "evaluate.prompts_t1=0", "evaluate.max_new_tokens=24"]
KEYS = {
    "temperatures", "dataset", "num_samples", "ece_before", "ece_after", "sample_batch_tokens", "sample_steps_per_sec",
    "max_batch_tokens",
}  # fmt: skip


def saved(folder: Path) -> Path:
    target, drafter = tiny_target(), trained_drafter()
    save_drafter(folder, drafter.state_dict(), drafter.config, target.vocabulary, TARGET, 8, torch.float32, {})
    return folder


def tiny(folder: Path, target: Path, *overrides: str) -> Settings:
    return load_settings(tiny_preset(folder, target), [*ALL_PROMPTS, "calibrate.min_rounds=10", *overrides])


def words(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("local_ray")
def test_a_drafter_is_calibrated_profiled_and_simulated(
    tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny(tmp_path, tiny_target, "calibrate.requests=4", "calibrate.repeats=2")
    calibrate(settings, saved(tmp_path / "drafter"), profile=True, dry_run=False)
    assert "ECE" in words(capsys)
    run = (tmp_path / "runs" / "latest").resolve()
    written = json.loads((run / "calibration.json").read_text())
    assert written.keys() == KEYS
    assert len(written["temperatures"]) == len(written["ece_before"]) == len(written["ece_after"]) == BLOCK
    assert written["sample_batch_tokens"] == [1, 2, 4, 8, 12, 16, 20] and written["max_batch_tokens"] == 20
    assert written["dataset"] == "held_out.jsonl, temperature 0"

    recorded = read_rounds(run / "rounds.jsonl")
    assert len(recorded) == 6 and {one.half for one in recorded} == {"fit", "report"}
    fitted = [one for prompt in recorded if prompt.half == "fit" for one in prompt.rounds]
    assert written["num_samples"] == sum(bool(one.logits) for one in fitted)
    result = json.loads((run / "result.json").read_text())
    assert [slot["ece"] for slot in result["after"]] == written["ece_after"]
    assert (run / "plots" / "reliability.png").read_bytes().startswith(PNG)
    record = json.loads((run / "run.json").read_text())
    client = MlflowClient(tracking_uri=record["mlflow_uri"])
    assert client.get_run(record["mlflow_run_id"]).data.metrics["ece_after_0"] == pytest.approx(written["ece_after"][0])
    kept = {item.path for item in client.list_artifacts(record["mlflow_run_id"])}
    assert {"calibration.json", "result.json", "rounds.jsonl", "plots"} <= kept

    simulate(run, None, 0.5, None, dry_run=False)
    assert "scheduler" in words(capsys)
    replays = json.loads((run / "simulation.json").read_text())["replays"]
    assert {one["requests"] for one in replays} == {1, 2, 4}
    reported = [one for prompt in recorded if prompt.half == "report" for one in prompt.rounds]
    (fixed,) = (one for one in replays if (one["policy"], one["requests"]) == ("fixed", 1))
    assert fixed["acceptance_length"] == pytest.approx(sum(one.kept for one in reported) / len(reported))
    assert all((run / "plots" / f"{name}.png").read_bytes().startswith(PNG) for name in ("throughput", "verified"))


def test_the_file_names_what_was_fitted_to_wherever_it_came_from(tmp_path: Path, tiny_target: Path) -> None:
    names = [("row-1", "gsm8k"), ("gsm8k/0", "gsm8k"), ("gsm8k/7", "gsm8k"), ("mt-bench/2", "mt-bench")]
    prompts = PromptRows([EvaluationPrompt(name, domain, ()) for name, domain in names], [[1]] * len(names))
    settings = tiny(tmp_path, tiny_target, "evaluate.benchmark_names=[gsm8k, mt-bench]", "calibrate.temperature=0.6")
    assert dataset_of(settings, prompts) == "held_out.jsonl and gsm8k and mt-bench, temperature 0.6"


def test_a_drafter_without_a_confidence_head_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    for folder in (save(tmp_path / "dflash", small_config("none")), save_eagle3(tmp_path / "eagle3")):
        with pytest.raises(InputError, match=r"no confidence head.*drafter\.confidence=true"):
            calibrate(tiny(tmp_path, tiny_target), folder, profile=False, dry_run=True)


def test_a_dry_run_prints_the_plan_and_touches_nothing(
    tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter, settings = saved(tmp_path / "drafter"), tiny(tmp_path, tiny_target)
    before = sorted(tmp_path.rglob("*"))
    calibrate(settings, drafter, profile=True, dry_run=True)
    assert sorted(tmp_path.rglob("*")) == before
    assert "each with at most 23 rounds at temperature 0" in words(capsys)


@pytest.mark.parametrize(
    ("override", "message"),
    [("calibrate.min_rounds=1000", "calibrate.min_rounds=1000"), ("evaluate.max_new_tokens=5", "max_new_tokens=5")],
)
def test_what_cannot_give_enough_rounds_is_refused_before_anything_starts(
    tmp_path: Path, tiny_target: Path, override: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        calibrate(tiny(tmp_path, tiny_target, override), saved(tmp_path / "drafter"), profile=False, dry_run=False)
    assert not (tmp_path / "runs").exists()


def run_folder(folder: Path, calibration: Calibration) -> Path:
    prompts = {half_of([number]): number for number in range(8)}
    rounds = (VerifiedRound((1.0, -1.0), 1, 2), VerifiedRound((0.5, 0.5), 0, 1))
    write_rounds(folder / "rounds.jsonl", [Recorded(str(number), half, rounds) for half, number in prompts.items()])
    save_calibration(folder / "calibration.json", calibration)
    return folder


def test_recorded_rounds_are_read_back_as_they_were(tmp_path: Path) -> None:
    found = read_rounds(run_folder(tmp_path, Calibration((1.0, 1.0))) / "rounds.jsonl")
    assert {one.half for one in found} == {"fit", "report"}
    assert found[0].rounds == (VerifiedRound((1.0, -1.0), 1, 2), VerifiedRound((0.5, 0.5), 0, 1))


RATES = StepRates((1, 12), (10.0, 5.0))


@pytest.mark.parametrize(
    ("calibration", "options", "message"),
    [
        (Calibration((1.0, 1.0), None), {}, "calibrate --profile"),
        (Calibration((1.0,), RATES), {}, "1 temperatures, the rounds have 2 slots"),
        (Calibration(None, RATES), {"requests": [5]}, "5 requests with 2 drafts each make passes beyond the 12 tokens"),
    ],
)
def test_a_simulation_without_what_it_needs_is_refused(
    tmp_path: Path, calibration: Calibration, options: dict[str, Any], message: str
) -> None:
    wanted = {"calibration": None, "threshold": 0.5, "requests": None, "dry_run": False, **options}
    with pytest.raises(InputError, match=message):
        simulate(run_folder(tmp_path, calibration), **wanted)
    assert not (tmp_path / "simulation.json").exists()


def test_a_simulation_takes_rates_of_another_file_and_says_what_it_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(tmp_path, Calibration((1.0, 1.0), None))
    other = tmp_path / "other.json"
    save_calibration(other, Calibration((2.0, 2.0), RATES))
    simulate(run, other, 0.5, [4, 1], dry_run=True)
    assert "2 rounds at 1, 4 requests" in words(capsys)
    assert load_calibration(run / "calibration.json").rates is None
    with pytest.raises(InputError, match=r"rounds\.jsonl"):
        simulate(tmp_path / "nowhere", other, 0.5, None, dry_run=True)
