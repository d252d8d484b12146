"""Rounds with every drafted slot verified, and the speed of the target's passes, from Ray processes."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from dspark.calibrating import CalibrateSettings
from dspark.decoding.calibration import VerifiedRound, half_of
from dspark.decoding.engine import Engine, Request, Round, Sampling
from dspark.decoding.profile import measure_step_rates
from dspark.model.exchange import load_for_target
from dspark.sections import EvaluateSettings, TargetSettings
from dspark.target import Target, load_target
from dspark.target_files import DTYPES


@dataclass(frozen=True)
class CalibrationTask:
    """What every calibrator needs: target, drafter folder, settings, and the longest prompt plus answer, in tokens."""

    target: TargetSettings
    drafter: Path
    evaluate: EvaluateSettings
    calibrate: CalibrateSettings
    max_length: int
    seed: int


class CalibratorActor:
    """One target and one drafter on one device; each call decodes one batch of prompts and returns their rounds."""

    def __init__(self, task: CalibrationTask) -> None:
        self.task = task
        target = _target(task.target, task.evaluate)
        loaded = load_for_target(task.drafter, task.target, target.device, DTYPES[task.evaluate.dtype])
        self.engine = Engine(target, loaded.drafter, task.calibrate.batch, task.max_length)

    def __call__(self, prompts: pa.Table) -> pa.Table:
        rows: list[dict[str, Any]] = prompts.to_pylist()
        evaluate = self.task.evaluate
        # Which drafts are accepted depends on what sampling leaves out, so that is as in the evaluation.
        sampling = Sampling(self.task.calibrate.temperature, evaluate.top_k, evaluate.top_p, self.task.seed)
        requests = [Request(row["id"], tuple(row["ids"]), evaluate.max_new_tokens, sampling) for row in rows]
        results = [
            {"id": row["id"], "half": half_of(row["ids"]), "rounds": [_verified(one) for one in generation.rounds]}
            for row, generation in zip(rows, self.engine.generate(requests), strict=True)
        ]
        return pa.table({"result": [json.dumps(result) for result in results]})


class ProfilerActor:
    """One target on one device; each call times passes of the shapes in its table, behind `context` tokens."""

    def __init__(
        self, target: TargetSettings, evaluate: EvaluateSettings, taps: tuple[int, ...], context: int, repeats: int
    ) -> None:
        self.target = _target(target, evaluate)
        self.taps, self.context, self.repeats = taps, context, repeats

    def __call__(self, shapes: pa.Table) -> pa.Table:
        pairs = [(row["rows"], row["width"]) for row in shapes.to_pylist()]
        rates = measure_step_rates(self.target, self.taps, pairs, self.context, self.repeats)
        return pa.table({"tokens": rates.tokens, "per_second": rates.per_second})


def _verified(one: Round) -> dict[str, Any]:
    """A `VerifiedRound` in plain JSON types."""
    assert len(one.logits) == one.proposed, "a calibration verifies every draft"
    return asdict(VerifiedRound(one.logits, one.accepted, one.kept))


def _target(target: TargetSettings, evaluate: EvaluateSettings) -> Target:
    torch.set_num_threads(evaluate.threads)
    return load_target(target.model_copy(update={"dtype": evaluate.dtype}))
