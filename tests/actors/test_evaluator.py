"""What lives in an evaluator's process, run without Ray."""

import json
from pathlib import Path

import torch

from actors.evaluator import Asked, EvaluationTask, EvaluatorActor, packed
from dspark.data.conversations import Message
from dspark.evaluation.benchmarks import EvaluationPrompt
from dspark.model.checkpoints import save_drafter
from dspark.sections import EvaluateSettings, TargetSettings
from dspark.target import load_target
from tests.dspark.decoding.decoders import random_drafter
from tests.dspark.folders import TARGET, convert
from tests.tiny import MASK_ID


def test_a_drafter_in_the_layout_of_an_engine_is_measured_as_the_published_one(
    tmp_path: Path, tiny_target: Path
) -> None:
    target = load_target(TargetSettings(model=str(tiny_target), dtype="fp32"))
    made = random_drafter(target, "vanilla", (0, 2), MASK_ID)
    state = made.state_dict()
    save_drafter(tmp_path / "source", state, made.config, target.vocabulary, TARGET, 8, torch.float32, {})
    prompt = EvaluationPrompt("a", "chat", (Message("user", "x"),))
    found = []
    for folder in (tmp_path / "source", convert(tmp_path / "source", tmp_path / "out", "specforge")):
        settings = EvaluateSettings(max_new_tokens=24, threads=torch.get_num_threads())
        task = EvaluationTask(
            TargetSettings(model=str(tiny_target)), {"it": folder}, settings, 64, None, seed=1, run="test"
        )
        prompts = packed([Asked(prompt, [5, 6, 7], 1.0, 1)])
        (row,) = EvaluatorActor(task)(prompts)["results"].to_pylist()
        (result,) = json.loads(row)
        found.append({key: result[key] for key in ("tokens", "drafted", "rounds")})
    assert found[0] == found[1]
    assert any(found[0]["drafted"])
