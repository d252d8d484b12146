"""The target in a Ray process: windows of plan rows in, captured tables out."""

from typing import Any

import numpy as np
import pyarrow as pa
import ray
import torch
from numpy.typing import NDArray

from dspark.capture import capture, prove_capture
from dspark.data.captures import Origin
from dspark.data.rows import sample_at
from dspark.model.warm_start import Bigrams, bigrams_of
from dspark.sections import TargetPoolSettings, TargetSettings
from dspark.target import load_target


class TargetActor:
    """One target on one device. `rows` is the table of all token rows, shared through the object store."""

    def __init__(self, target: TargetSettings, pool: TargetPoolSettings, origin: Origin, rows: Any) -> None:
        torch.set_num_threads(pool.threads)
        self.target = load_target(target)
        self.origin, self.batch_tokens = origin, pool.batch_tokens
        self.rows: pa.Table = ray.get(rows[0])
        prove_capture(self.target, sample_at(self.rows, 0), origin.taps)

    def __call__(self, window: pa.Table) -> pa.Table:
        samples = [sample_at(self.rows, row) for row in window.column("row").to_pylist()]
        return capture(self.target, samples, self.origin, self.batch_tokens)


class BigramActor:
    """A target for one question before training: what it predicts after single tokens."""

    def ready(self) -> None:
        """Returns once the actor has its place."""

    def bigrams(
        self, target: TargetSettings, pool: TargetPoolSettings, prompt: list[int], counts_V: NDArray[np.int64]
    ) -> Bigrams:
        """The states after `prompt` and each token that was counted."""
        torch.set_num_threads(pool.threads)
        tokens_N = np.flatnonzero(counts_V)
        return bigrams_of(load_target(target), prompt, torch.from_numpy(tokens_N), torch.from_numpy(counts_V[tokens_N]))
