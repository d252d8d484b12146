"""Acceptance that is measured while a drafter is trained."""

from pathlib import Path

import pytest
from mlflow import MlflowClient

from actors.gauges import MEASURES, exported
from actors.tracking import default_uri
from jobs.config import load_settings
from jobs.train import train
from tests.conftest import tiny_preset
from tests.endpoint import Endpoint


def test_an_evaluator_measures_newest_drafters_into_the_run_and_skips_what_it_is_too_slow_for(
    tmp_path: Path, tiny_target: Path, local_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    preset = tiny_preset(tmp_path, tiny_target, rows=16)
    settings = load_settings(preset, ["evaluate.every=2", "evaluate.prompts_t0=2", "train.micro_batch=1"])
    with Endpoint() as endpoint:
        train(settings, None, False)
    printed = " ".join(capsys.readouterr().out.split())
    client = MlflowClient(default_uri(settings.output))
    experiment = client.get_experiment_by_name(settings.tracking.experiment)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    found = {entry.step: entry.value for entry in client.get_metric_history(run.info.run_id, "eval_acceptance_length")}
    # 8 steps, of which the last one's drafter is measured by `evaluate`.
    assert found and set(found) <= {2, 4, 6}
    assert f"measured at {len(found)} steps while training, {3 - len(found)} more were skipped" in printed
    assert all(1 <= length <= settings.drafter.block + 1 for length in found.values())
    # All that trainers and targets show is at Ray's endpoint, under the name of the run.
    names = {exported(name) for name in MEASURES if "decode" not in name and "length" not in name}
    assert endpoint.found.keys() >= names
    label = f'run="{(settings.output / "latest").resolve().name}"'
    assert [name for name in names if label not in endpoint.found[name]] == []
    assert {f'slot="{slot}"' for slot in range(settings.drafter.block)} <= endpoint.found["ray_dspark_accept_rate"]
    assert any(label.startswith("dataset=") for label in endpoint.found["ray_data_current_bytes"])
