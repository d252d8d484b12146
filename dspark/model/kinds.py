"""The kinds of drafters, from their configurations: the one place that tells them apart when a drafter is made."""

from torch import Tensor

from dspark.model.config import DSparkConfig, Eagle3Config
from dspark.model.drafter import Drafter, new_drafter
from dspark.model.eagle3 import Eagle3Drafter, new_eagle3_drafter

AnyConfig = DSparkConfig | Eagle3Config
AnyDrafter = Drafter | Eagle3Drafter


def drafter_of(config: AnyConfig) -> AnyDrafter:
    """A drafter of this architecture; its weights mean nothing yet."""
    return Drafter(config) if isinstance(config, DSparkConfig) else Eagle3Drafter(config)


def fresh_drafter(config: AnyConfig, seed: int, kept: Tensor | None) -> AnyDrafter:
    """A drafter at the start of its training, equal for equal seeds; `kept` [D]: ids of a reduced vocabulary."""
    if isinstance(config, DSparkConfig):
        return new_drafter(config, seed, kept)
    return new_eagle3_drafter(config, seed, kept)
