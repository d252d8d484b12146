"""`dspark evaluate` through real Ray: drafters side by side, later turns, batch sizes, and a run that is taken up."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient

from actors.gauges import exported
from dspark.errors import InputError
from dspark.model.checkpoints import save_drafter
from dspark.sections import TargetSettings
from dspark.target import load_target
from jobs.config import load_settings
from jobs.evaluate import evaluate
from tests.conftest import tiny_preset
from tests.dspark.decoding.decoders import random_drafter, random_eagle3
from tests.dspark.folders import TARGET
from tests.endpoint import Endpoint
from tests.tiny import MASK_ID

pytestmark = pytest.mark.usefixtures("local_ray")

MEASURED = ("id", "drafter", "batch", "turn", "temperature", "tokens", "plain_tokens", "rounds", "prompt_tokens")


def drafters_of(folder: Path, target: Path) -> list[Path]:
    """Two drafters of different kinds."""
    loaded = load_target(TargetSettings(model=str(target), dtype="fp32"))
    block, chain = random_drafter(loaded, "vanilla", (0, 2), MASK_ID), random_eagle3(loaded, (0, 2))
    for name, made, anchors in (("dspark", block, 8), ("eagle3", chain, None)):
        state, vocabulary = made.state_dict(), loaded.vocabulary
        save_drafter(folder / name, state, made.config, vocabulary, TARGET, anchors, torch.float32, {})
    return [folder / "dspark", folder / "eagle3"]


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]


def test_drafters_are_measured_side_by_side_and_a_killed_run_decodes_only_what_is_missing(
    tmp_path: Path, tiny_target: Path
) -> None:
    (tmp_path / "bench").mkdir()
    questions = [{"turns": [f"the cat {i}", "and then?"]} for i in range(3)]
    (tmp_path / "bench" / "mt-bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    measured = {"benchmarks": str(tmp_path / "bench"), "turns": "all", "batch": [1, 2], "prompts_t0": 3}
    preset = tiny_preset(tmp_path, tiny_target, evaluate=measured)
    drafters = drafters_of(tmp_path, tiny_target)
    with Endpoint() as endpoint:
        evaluate(load_settings(preset, []), drafters, None, False)
    run = (tmp_path / "runs" / "latest").resolve()
    for name in ("dspark_decoded_tokens", "dspark_decode_seconds"):
        assert {f'run="{run.name}"', 'drafter="none"', 'drafter="dspark"'} <= endpoint.found[exported(name)]
    first, record = rows_of(run), (run / "run.json").read_text()
    check_rows(first)
    check_files(run)

    # Killed: of the file stay its first ten lines and a piece of another one.
    text = (run / "results.jsonl").read_text().splitlines(keepends=True)
    (run / "results.jsonl").write_text("".join(text[:10]) + text[10][:50])
    with pytest.raises(InputError, match=r"evaluate\.max_new_tokens was 8 and is 9 now"):
        evaluate(load_settings(preset, ["evaluate.max_new_tokens=9"]), drafters, run, False)
    wider = load_settings(preset, ["evaluate.actors=2", "evaluate.max_actors=3"])
    evaluate(wider, drafters, run, False)
    again = rows_of(run)
    assert [[row[key] for key in MEASURED] for row in again] == [[row[key] for key in MEASURED] for row in first]
    # What was there whole was not decoded again: its times are the old ones.
    kept = [old["plain_seconds"] == new["plain_seconds"] for old, new in zip(first, again, strict=True)]
    assert 0 < sum(kept) <= 10
    assert (run / "run.json").read_text() == record


def check_rows(rows: list[dict[str, Any]]) -> None:
    # 3 held-out prompts, 2 of them sampled as well, 3 questions of two turns; two drafters, two batch sizes.
    assert len(rows) == (3 + 2 + 6) * 2 * 2
    one, two = (
        {(row["id"], row["temperature"], row["drafter"]): row["tokens"] for row in rows if row["batch"] == size}
        for size in (1, 2)
    )
    assert one == two
    assert all(row["identical"] for row in rows if row["temperature"] == 0)
    # A later turn reads the target's own answer, which is one for both drafters.
    late = [row for row in rows if row["turn"] == 2]
    assert len(late) == 12 and all(row["prompt"] == "and then?" for row in late)
    assert len({(row["id"], tuple(row["plain_tokens"])) for row in late}) == 3
    assert min(row["prompt_tokens"] for row in late) > max(row["prompt_tokens"] for row in rows if row["turn"] == 1)


def check_files(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    assert list(result["drafters"]) == ["dspark", "eagle3"]
    assert result["identical"] == [3, 3]
    scopes = result["comparison"]["benchmarks"]["t0"]["scopes"]
    assert set(scopes) == {"mt-bench", "mean chat"}
    overall = result["drafters"]["eagle3"]["benchmarks"]["t0"]["overall"]
    assert scopes["mt-bench"]["lengths"]["eagle3"]["value"] == overall["acceptance_length"]
    assert [row["batch"] for row in result["drafters"]["eagle3"]["batches"]] == [1] * 3 + [2] * 3
    assert result["drafters"]["dspark"]["confidence"]["thresholds"]
    lines = list(csv.DictReader((run / "results.csv").open()))
    assert {(row["drafter"], row["section"], row["domain"]) for row in lines} >= {
        ("eagle3", "benchmarks", "mean chat"), ("dspark", "held_out", "all"),
    }  # fmt: skip
    (whole,) = (row for row in lines if (row["drafter"], row["batch"], row["domain"]) == ("eagle3", "1", "mt-bench"))
    interval = scopes["mt-bench"]["lengths"]["eagle3"]
    assert [float(whole[f"acceptance_length_{end}"]) for end in ("low", "high")] == [interval["low"], interval["high"]]
    assert len([row for row in lines if row["batch"] == "2" and row["speedup"]]) == 2 * 3
    record = json.loads((run / "run.json").read_text())
    client = MlflowClient(tracking_uri=record["mlflow_uri"])
    metrics = client.get_run(record["mlflow_run_id"]).data.metrics
    assert metrics["drafters.eagle3.held_out.t0.overall.acceptance_length"] >= 1
    assert {"report.html", "results.csv"} <= {item.path for item in client.list_artifacts(record["mlflow_run_id"])}
