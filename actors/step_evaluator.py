"""Acceptance of a drafter while it is trained: a target in a Ray process decodes with the tensors of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.decoding.engine import Engine, Request, Sampling
from dspark.decoding.policies import Policy
from dspark.evaluation.metrics import acceptance_length
from dspark.model.kinds import AnyConfig, fresh_drafter
from dspark.sections import EvaluateSettings, TargetSettings
from dspark.target import load_target
from dspark.target_files import DTYPES


@dataclass(frozen=True)
class StepTask:
    """What measures a drafter while it is trained: target, architecture, settings, prompts as token ids, policy."""

    target: TargetSettings
    draft: AnyConfig
    kept: NDArray[np.int64] | None
    evaluate: EvaluateSettings
    prompts: Mapping[str, Sequence[int]]  # by request id
    seed: int
    policy: Policy
    temperatures: tuple[float, ...] | None  # of the confidences, one per slot


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
        longest = max(len(ids) for ids in task.prompts.values()) + most
        engine = Engine(self.target, drafter, task.evaluate.batch[0], longest, task.policy, task.temperatures)
        requests = [
            Request(name, tuple(ids), most, Sampling(temperature=0.0, seed=task.seed))
            for name, ids in task.prompts.items()
        ]
        return acceptance_length([asdict(one) for found in engine.generate(requests) for one in found.rounds])
