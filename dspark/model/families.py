"""What differs between target families, as values: a new family is a new value here.

Every family below is written as a drafter in the Qwen3 form (query and key norm per head), which serving engines load.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from dspark.errors import InputError


@dataclass(frozen=True)
class Family:
    """Where a transformers model of one `model_type` keeps the parts that a drafter needs."""

    model_type: str
    decoder: str = "model"  # attribute that holds embed_tokens, layers and norm
    head: str = "lm_head"


QWEN3 = Family("qwen3")
QWEN2 = Family("qwen2")
LLAMA = Family("llama")
MISTRAL = Family("mistral")

FAMILIES = {family.model_type: family for family in (QWEN3, QWEN2, LLAMA, MISTRAL)}


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a target's configuration.

    Raises:
        InputError: the model type is not supported.
    """
    kind: Any = config.model_type
    if kind not in FAMILIES:
        raise InputError(
            f"target family {kind!r} is not supported (supported: {', '.join(sorted(FAMILIES))}): choose another target"
        )
    return FAMILIES[kind]
