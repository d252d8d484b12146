"""Which settings a kind of drafter has no use for: naming one is an error, and no dump shows it."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

# Dotted keys and whole sections, by `drafter.kind`.
UNUSED: Mapping[str, tuple[str, ...]] = {
    "dspark": ("eagle3",),
    "eagle3": (
        "drafter.layers", "drafter.mask_token_id", "drafter.markov_rank", "drafter.markov_head", "drafter.init",
        "drafter.confidence", "drafter.confidence_with_markov", "loss", "train.anchors",
    ),
}  # fmt: skip


def named_unused(settings: BaseModel, kind: str) -> list[str]:
    """The keys that the settings were given, whatever their values, and this kind has no use for."""
    return [key for key in UNUSED[kind] if _names(settings, key)]


def _names(section: BaseModel, key: str) -> bool:
    *sections, leaf = key.split(".")
    for name in sections:
        section = getattr(section, name)
    return leaf in section.model_fields_set


def without_unused(values: dict[str, Any], kind: str) -> dict[str, Any]:
    """A dump of settings with the keys alone that this kind has."""
    for section, _, key in (unused.partition(".") for unused in UNUSED[kind]):
        if key:
            values.get(section, {}).pop(key, None)
        else:
            values.pop(section, None)
    return values
