"""Settings: frozen, typed, closed to unknown keys; each default is declared here and nowhere else.

A preset (`platform/presets/*.yaml`) sets any of them, dotted overrides (`loss.l1=0.9`) come last. Rules that need only
the settings are checked here; rules that need the target (taps, mask token) in `dspark.model.config`.
"""

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from dspark.answering import PrepareSettings
from dspark.caching import CacheSettings
from dspark.calibrating import CalibrateSettings
from dspark.kind_keys import named_unused, without_unused
from dspark.learning import DrafterSettings, Eagle3Settings, LossSettings, TrainSettings
from dspark.sections import (
    NAME_PATTERN,
    Count,
    DataSettings,
    EvaluateSettings,
    LocalPath,
    RaySettings,
    Section,
    TargetPoolSettings,
    TargetSettings,
    TrackingSettings,
    ValidationSettings,
)
from dspark.tuning import TuneSettings


class Settings(Section):
    """One experiment."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    seed: Count = 42
    output: LocalPath = Field(Path("runs"), description="folder that holds one folder per run")
    target: TargetSettings
    targets: TargetPoolSettings = TargetPoolSettings()
    data: DataSettings
    prepare: PrepareSettings = PrepareSettings()
    cache: CacheSettings = CacheSettings()
    drafter: DrafterSettings
    loss: LossSettings = LossSettings()
    eagle3: Eagle3Settings = Eagle3Settings()
    train: TrainSettings = TrainSettings()
    validation: ValidationSettings = ValidationSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    calibrate: CalibrateSettings = CalibrateSettings()
    tune: TuneSettings = TuneSettings()
    tracking: TrackingSettings = TrackingSettings()
    ray: RaySettings = RaySettings()

    @model_validator(mode="after")
    def _kind_has_all(self) -> Self:
        kind = self.drafter.kind
        if named := named_unused(self, kind):
            raise ValueError(f"drafter.kind={kind} has no {', '.join(named)}: leave them out or choose another kind")
        return self

    @model_serializer(mode="wrap")
    def _used(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_unused(dump(self), self.drafter.kind)

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if self.loss.confidence > 0 and not self.drafter.confidence:
            raise ValueError("loss.confidence > 0 needs drafter.confidence=true: set one of them")
        if self.drafter.confidence and self.loss.confidence == 0:
            raise ValueError("drafter.confidence=true needs loss.confidence > 0: an untrained head would be exported")
        if self.train.pack_tokens is not None and self.train.pack_tokens < self.data.max_length:
            raise ValueError(
                f"train.pack_tokens={self.train.pack_tokens} is below data.max_length={self.data.max_length}: a row of "
                "that length would not fit, change one of them"
            )
        if self.targets.max_actors is not None and self.targets.max_actors < self.targets.actors:
            raise ValueError(
                f"targets.max_actors={self.targets.max_actors} is below targets.actors={self.targets.actors}"
            )
        self._check_device_map()
        if self.validation.every is not None and self.data.validation is None:
            raise ValueError(f"validation.every={self.validation.every} measures data.validation: name that file")
        if self.validation.every is None and self.data.validation is not None:
            raise ValueError("data.validation is measured every validation.every steps: set that number")
        if self.train.keep_best is not None and (
            self.validation.every is None or self.train.checkpoint_every % self.validation.every
        ):
            raise ValueError(
                f"train.keep_best={self.train.keep_best} needs a measurement at each checkpoint: make "
                f"train.checkpoint_every={self.train.checkpoint_every} a multiple of "
                f"validation.every={self.validation.every}"
            )
        if self.data.source == "live_and_keep":
            self._check_kept()
        return self

    def _check_kept(self) -> None:
        if self.cache.taps != "bf16":
            raise ValueError(
                f"cache.taps={self.cache.taps} loses precision: with data.source=live_and_keep later epochs would "
                "train on other states than the first; keep cache.taps=bf16, or capture first and use data.source=cache"
            )
        if unused := self.cache.of_capture:
            raise ValueError(
                f"data.source=live_and_keep has no {', '.join(f'cache.{key}' for key in unused)}: its shards are the "
                "windows of training (targets.window_rows), and states that are not finite are counted; leave these at "
                "their defaults, or capture first and use data.source=cache"
            )

    def _check_device_map(self) -> None:
        placed = self.target.device_map
        if not isinstance(placed, dict):
            return
        most = max((place for place in placed.values() if isinstance(place, int)), default=-1)
        if most >= ceil(self.targets.gpus):
            raise ValueError(
                f"target.device_map places modules on GPU {most}, and an actor with targets.gpus={self.targets.gpus:g} "
                f"has none of that number: book {most + 1}, they are numbered from 0"
            )


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one level of dotted keys: {"loss": {"l1": 0.9}} becomes {"loss.l1": 0.9}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
