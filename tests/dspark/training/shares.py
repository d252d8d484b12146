"""A captured table, a plan and settings from which tests make a rank's share of a step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dspark.config import Settings
from dspark.data.captures import encode
from dspark.data.origin import Origin
from dspark.data.plan import Plan
from dspark.data.render import Sample
from dspark.learning import DrafterSettings, Eagle3Settings, LossSettings, TrainSettings
from dspark.model.config import DraftConfig, DSparkConfig, Eagle3Config
from dspark.sections import DataSettings, TargetSettings
from dspark.training.share import Share, make_share


def captured(
    config: DraftConfig, masks: Sequence[Sequence[int]], broken: Sequence[int] = (), seed: int = 7
) -> pa.Table:
    """Samples `row-0`, `row-1`, ... with random ids and states; those numbered in `broken` end in states of NaN."""
    samples: list[Sample] = []
    taps: dict[int, list[Tensor]] = {tap: [] for tap in config.taps}
    final: list[Tensor] = []
    for number, mask in enumerate(masks):
        generator = torch.Generator().manual_seed(seed + 1000 * number)
        ids = torch.randint(config.vocab - 1, (len(mask),), generator=generator).to(torch.int32)
        samples.append(Sample(f"row-{number}", f"row-{number}", None, ids.numpy(), np.array(mask, dtype=np.uint8)))
        states = torch.randn(len(config.taps) + 1, len(mask), config.hidden, generator=generator)
        if number in broken:
            states[:, -1] = float("nan")
        for tap, value in zip(config.taps, states, strict=False):
            taps[tap].append(value)
        final.append(states[-1])
    return encode(Origin("t", "local", "f", "r", config.taps, config.hidden, "fp32"), samples, taps, final)


def settings_of(config: DSparkConfig, loss: LossSettings | None = None, max_length: int = 16, **train: Any) -> Settings:
    """Settings for a drafter of this form; `train` are keys of that section."""
    head = {"markov_rank": config.markov_rank, "markov_head": config.markov_head, "confidence": config.confidence}
    return Settings(
        name="small",
        target=TargetSettings(model="none", dtype="fp32"),
        data=DataSettings(conversations=Path("none"), held_out=Path("none"), max_length=max_length),
        drafter=DrafterSettings(
            layers=config.layers,
            block=config.block,
            taps=config.taps,
            mask_token_id=config.mask_token_id,
            confidence_with_markov=config.confidence_with_markov,
            **head,
        ),
        loss=loss or LossSettings(confidence=1.0 if config.confidence else 0.0),
        train=TrainSettings(**{"precision": "fp32", "anchors": 4, **train}),
    )


def chain_settings_of(config: Eagle3Config, chains: Eagle3Settings, **train: Any) -> Settings:
    """Settings for an EAGLE-3 drafter of this form; `train` are keys of that section."""
    return Settings(
        name="small",
        target=TargetSettings(model="none", dtype="fp32"),
        data=DataSettings(conversations=Path("none"), held_out=Path("none"), max_length=16),
        drafter=DrafterSettings(kind="eagle3", block=config.block, taps=config.taps),
        eagle3=chains,
        train=TrainSettings(**{"precision": "fp32", **train}),
    )


def share_of(table: pa.Table, config: DraftConfig, settings: Settings, counted: Sequence[bool] | None = None) -> Share:
    """One rank's share that holds the whole table, all of it of epoch 0."""
    rows = table.num_rows
    plan = Plan(np.arange(rows), np.array(counted or [True] * rows), np.zeros(rows, np.int32), rows)
    return make_share(table, range(rows), plan, config, settings)
