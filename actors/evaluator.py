"""Speculative decoding of prompts in a Ray process, beside plain decoding of the same prompts by the same target."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.decoding.engine import Engine, Generation, Request, Sampling
from dspark.decoding.policies import choose_policy
from dspark.errors import InputError
from dspark.evaluation.metrics import PromptResult, acceptance_length
from dspark.model.exchange import load_for_target
from dspark.model.kinds import AnyConfig, fresh_drafter
from dspark.sections import EvaluateSettings, TargetSettings
from dspark.target import DTYPES, load_target


@dataclass(frozen=True)
class EvaluationTask:
    """What every evaluator needs: target, drafter folder, settings, and the longest prompt plus answer, in tokens."""

    target: TargetSettings
    drafter: Path
    evaluate: EvaluateSettings
    max_length: int
    seed: int


class EvaluatorActor:
    """One target and one drafter on one device; each call decodes one batch of prompts twice."""

    def __init__(self, task: EvaluationTask) -> None:
        torch.set_num_threads(task.evaluate.threads)
        self.task = task
        self.target = load_target(task.target.model_copy(update={"dtype": task.evaluate.dtype}))
        loaded = load_for_target(task.drafter, task.target, self.target.device, DTYPES[task.evaluate.dtype])
        if loaded.config.vocab != self.target.vocab_size or loaded.config.hidden != self.target.hidden:
            raise InputError(
                f"drafter {task.drafter} has vocabulary {loaded.config.vocab} and width {loaded.config.hidden}, its "
                f"target {self.target.vocab_size} and {self.target.hidden}: they do not belong together"
            )
        evaluate = task.evaluate
        policy = choose_policy(evaluate.policy, evaluate.slots, evaluate.threshold, evaluate.calibration)
        self.plain = Engine(self.target, None, evaluate.batch, task.max_length)
        self.speculative = Engine(self.target, loaded.drafter, evaluate.batch, task.max_length, *policy)
        for engine in (self.plain, self.speculative):
            engine.generate([Request("warm-up", (1, 2, 3), 4, Sampling())])

    def __call__(self, prompts: pa.Table) -> pa.Table:
        rows: list[dict[str, Any]] = prompts.to_pylist()
        requests = [
            Request(
                row["id"],
                tuple(row["ids"]),
                self.task.evaluate.max_new_tokens,
                self._sampling(row["temperature"]),
            )
            for row in rows
        ]
        before = asdict(self.speculative.seconds)
        plain, plain_seconds = _timed(lambda: self.plain.generate(requests))
        drafted, drafted_seconds = _timed(lambda: self.speculative.generate(requests))
        spent = {name: (value - before[name]) / len(rows) for name, value in asdict(self.speculative.seconds).items()}
        results = [
            PromptResult(
                id=row["id"],
                domain=row["domain"],
                temperature=row["temperature"],
                prompt_tokens=len(row["ids"]),
                tokens=list(speculative.tokens),
                drafted=list(speculative.drafted),
                finish=speculative.finish,
                rounds=[asdict(one) for one in speculative.rounds],
                plain_tokens=list(reference.tokens),
                identical=speculative.tokens == reference.tokens,
                plain_seconds=plain_seconds / len(rows),
                speculative_seconds=drafted_seconds / len(rows),
                seconds=spent,
                text=self._text(speculative),
                prompt=row["prompt"],
            )
            for row, reference, speculative in zip(rows, plain, drafted, strict=True)
        ]
        return pa.table({"result": [json.dumps(asdict(result)) for result in results]})

    def _sampling(self, temperature: float) -> Sampling:
        evaluate = self.task.evaluate
        return Sampling(temperature, evaluate.top_k, evaluate.top_p, self.task.seed)

    def _text(self, generation: Generation) -> str:
        return str(self.target.tokenizer.decode(list(generation.tokens), skip_special_tokens=True))


@dataclass(frozen=True)
class StepTask:
    """What measures a drafter while it is trained: target, architecture, settings, and prompts as token ids."""

    target: TargetSettings
    draft: AnyConfig
    kept: NDArray[np.int64] | None
    evaluate: EvaluateSettings
    prompts: Mapping[str, Sequence[int]]  # by request id
    seed: int


class StepEvaluator:
    """One target on one device, and in turn the drafters of training steps; decodes at temperature 0."""

    def __init__(self, task: StepTask) -> None:
        torch.set_num_threads(task.evaluate.threads)
        self.task = task
        self.target = load_target(task.target.model_copy(update={"dtype": task.evaluate.dtype}))

    def acceptance(self, state: Mapping[str, Tensor]) -> float | None:
        """Acceptance length of the drafter with these tensors over all prompts; None where no round was made."""
        task = self.task
        drafter = fresh_drafter(task.draft, task.seed, None if task.kept is None else torch.tensor(task.kept))
        drafter.load_state_dict(dict(state))
        drafter.to(self.target.device, DTYPES[task.evaluate.dtype])
        most = task.evaluate.max_new_tokens
        engine = Engine(
            self.target, drafter, task.evaluate.batch, max(len(ids) for ids in task.prompts.values()) + most
        )
        requests = [
            Request(name, tuple(ids), most, Sampling(temperature=0.0, seed=task.seed))
            for name, ids in task.prompts.items()
        ]
        return acceptance_length([asdict(one) for found in engine.generate(requests) for one in found.rounds])


def _timed(work: Callable[[], list[Generation]]) -> tuple[list[Generation], float]:
    since = time.perf_counter()
    return work(), time.perf_counter() - since
