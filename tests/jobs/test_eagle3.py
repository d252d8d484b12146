"""EAGLE-3 as a user runs it: training, evaluation and one answer, on a tiny target through real Ray.

`test_evaluate.py` measures such a drafter from its folder, beside one of another kind.
"""

import json
from pathlib import Path

import pytest
import yaml

from dspark.model.checkpoints import load_drafter
from dspark.model.config import Eagle3Config
from dspark.target_files import DTYPES, default_device
from jobs.assistant import Wish
from jobs.config import load_settings
from jobs.generate import generate
from jobs.run import run
from tests.conftest import tiny_preset

pytestmark = pytest.mark.usefixtures("local_ray")


def eagle3_preset(folder: Path, target: Path) -> Path:
    """The tiny preset with an EAGLE-3 drafter."""
    path = tiny_preset(folder, target)
    values = yaml.safe_load(path.read_text())
    values["drafter"] = {"kind": "eagle3", "block": 3, "taps": [0, 2, 4], "vocab": 200}
    values["eagle3"] = {"ttt_length": 4}
    del values["train"]["anchors"]
    # Two rows a rank, packed into one.
    packed = {"global_batch": 4, "micro_batch": 2, "pack_tokens": 256}
    values["train"] |= {"workers": 2, "zero_stage": 3, "max_steps": 6, "lr": 1e-2, **packed}
    path.write_text(yaml.safe_dump(values))
    return path


def test_a_drafter_is_trained_evaluated_and_answers(
    tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = load_settings(eagle3_preset(tmp_path, tiny_target), [])
    run(settings, None, False)
    latest = (tmp_path / "runs" / "latest").resolve()
    result = json.loads((latest / "result.json").read_text())
    assert result["identical"] == [4, 4] and result["steps"] == 6
    history = [json.loads(line) for line in (latest / "history.jsonl").read_text().splitlines()]
    assert len(history) == 6
    assert {f"accept_rate_{step}" for step in range(4)} | {"loss_step_3", "tau_greedy"} <= history[0].keys()
    # Ranks, shards and a fresh start: every sequence's loss is near that of guessing among 200 tokens, 5.3 a step.
    assert 10 < history[0]["loss"] < 25 and history[-1]["loss"] < history[0]["loss"]
    config = load_drafter(latest / "drafter", default_device(), DTYPES["fp32"]).config
    assert isinstance(config, Eagle3Config)
    assert (config.block, config.ttt_length, config.draft_vocab) == (3, 4, 200)

    capsys.readouterr()
    generate(latest / "drafter", "the cat", None, False, Wish(max_new_tokens=6))
    assert ", acceptance length " in capsys.readouterr().err
