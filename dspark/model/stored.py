"""A drafter between two file layouts: its keys and tensors under their published names, with nothing loaded or cast."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dspark.errors import InputError
from dspark.model.checkpoints import HEAD, RUN_KEY
from dspark.model.config import DraftConfig

ARCHITECTURE = "Qwen3DSparkModel"  # of the published layout, the only one that other layouts are made from
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
# What a drafter has beyond the configuration of its decoder layers.
DRAFT_KEYS = (
    "architectures", "dtype", "draft_vocab_size", "num_target_layers", "target_layer_ids", "block_size", "num_anchors",
    "mask_token_id", *HEADS, RUN_KEY,
)  # fmt: skip
# What the decoder layers need; which values a drafter can have is for the published layout to say.
LAYER_KEYS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "attention_bias", "rms_norm_eps", "initializer_range",
    "max_position_embeddings", "layer_types",
)  # fmt: skip
# Blocks per row while training: other layouts hold no such key, and nothing that is computed depends on it.
PUBLISHED_ANCHORS = 512


@dataclass(frozen=True)
class Stored:
    """config.json and tensors of a folder.

    `next_token`: slot k of a block predicts the token after its own place, as every drafter of this project does. In a
    DFlash checkpoint it predicts the token of its own place; such tensors can start a drafter, but are none.
    """

    values: dict[str, Any]
    tensors: dict[str, Tensor]
    next_token: bool = True


@dataclass(frozen=True)
class Verifier:
    """The target as another layout names it."""

    name: str
    architectures: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """A file layout as a value: how it is told from others, read into published names, and written from them.

    `kind` is that of the drafters it holds, by their configuration; one name may stand for a layout of each kind.
    `refusals` says what of a drafter the layout, or the engine that it is for, cannot express; `vocabulary`, what a
    folder holds of the target: embedding and head, the embedding and the head's rows for the draft tokens, these rows
    alone, or nothing.
    """

    name: str
    kind: type[DraftConfig]
    matches: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Stored], Stored]
    write: Callable[[Stored, Verifier | None], Stored] | None  # None: it is only read
    refusals: Callable[[DraftConfig], list[str]]
    vocabulary: Literal["whole", "kept", "rows", "none"]


def with_kept_rows(stored: Stored) -> dict[str, Tensor]:
    """The tensors of a published folder, the head with its rows for the draft tokens alone."""
    tensors, values = dict(stored.tensors), stored.values
    if "draft_vocab_size" in values and len(tensors[HEAD]) == values["vocab_size"]:
        kept_D = torch.arange(values["draft_vocab_size"]) + tensors["d2t"].cpu()
        tensors[HEAD] = tensors[HEAD][kept_D]
    return tensors


class Keys:
    """Takes keys out of nested values by their dotted path, and remembers those that are missing or wrong."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.faults: list[str] = []

    def get(self, path: str, default: Any = None) -> Any:
        """The value, `default` where it is missing."""
        found: Any = self.values
        for key in path.split("."):
            if not isinstance(found, Mapping) or key not in found:
                return default
            found = found[key]
        return found

    def has(self, path: str) -> bool:
        section, _, key = path.rpartition(".")
        found = self.get(section) if section else self.values
        return isinstance(found, Mapping) and key in found

    def take(self, path: str, why: str = "") -> Any:
        """The value; a missing key becomes a fault, with `why` behind it."""
        if not self.has(path):
            self.faults.append(f"{path} is missing{why}")
        return self.get(path)

    def section(self, path: str) -> dict[str, Any]:
        """A nested section; empty where it is missing or none."""
        found = self.take(path)
        if self.has(path) and not isinstance(found, dict):
            self.faults.append(f"{path} is {found!r}, needed a section with keys")
        return dict(found) if isinstance(found, dict) else {}

    def must(self, path: str, *allowed: Any) -> None:
        """Checks that the key is there with one of these values."""
        found = self.take(path)
        if self.has(path) and not any(type(found) is type(one) and found == one for one in allowed):
            self.faults.append(f"{path}={found!r}, needed {' or '.join(map(repr, allowed))}")

    def check(self) -> None:
        """Raises InputError that names every fault."""
        if self.faults:
            raise InputError("; ".join(self.faults))
