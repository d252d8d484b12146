"""The validation rows of a run, captured by one target before the first step."""

from typing import Any

import numpy as np
import pyarrow as pa
import ray
import torch

from actors.placement import target_place
from actors.task import Validation, validation_plan
from dspark.capture import capture
from dspark.config import Settings
from dspark.data.origin import Origin
from dspark.data.rows import sample_at, samples_fingerprint
from dspark.sections import TargetPoolSettings, TargetSettings
from dspark.target import load_target


class ValidationActor:
    """A target for the validation rows; it goes when they are captured."""

    def __init__(self, target: TargetSettings, pool: TargetPoolSettings, origin: Origin) -> None:
        torch.set_num_threads(pool.threads)
        self.target, self.origin, self.batch_tokens = load_target(target), origin, pool.batch_tokens

    def ready(self) -> None:
        """Returns once the actor has its place."""

    def table(self, rows: pa.Table, numbers: list[int]) -> pa.Table:
        """The captured table of these rows."""
        return capture(self.target, [sample_at(rows, row) for row in numbers], self.origin, self.batch_tokens)


def captured_validation(settings: Settings, rows: pa.Table, origin: Origin) -> Validation:
    """The validation rows with references to the captured tables of the plan's steps, which this process owns.

    The actor takes its place before trainers can take the last one, and goes with its handle when it has answered.
    """
    pool, plan = settings.targets, validation_plan(rows.num_rows, settings.train)
    placed = ray.remote(**target_place("targets", pool, settings.ray.target_labels))
    actor: Any = placed(ValidationActor).remote(settings.target, pool, origin)
    ray.get(actor.ready.remote())
    table = ray.put(rows)
    order = np.asarray(plan.order).reshape(-1, plan.global_batch).tolist()
    mark = f"{samples_fingerprint(rows.column('sample_id').to_pylist())} {settings.validation.metric}"
    return Validation(rows.num_rows, mark, tuple(actor.table.remote(table, numbers) for numbers in order))
