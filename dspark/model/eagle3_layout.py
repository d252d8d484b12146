"""config.json of an EAGLE-3 drafter: the target's text configuration in the form of the layer, and the drafter's keys.

The published layout has no key for how many tokens a round drafts, so `block_size` is our own addition; a file without
it drafts as many as the drafter was trained for. How layers are written, and which forms no engine loads, is as for
DSpark (`dspark.model.layout`).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from transformers import PreTrainedConfig

from dspark.model.config import Eagle3Config
from dspark.model.layout import check_rope, drafter_keys, keys_beyond, sizes_of
from dspark.model.layout_keys import Gemma4Layers, Layout, PlainLayers, read_layout
from dspark.sections import Positive

_KIND = "Eagle3Model"


class _Eagle3Layout(Layout):
    draft_num_hidden_layers: Literal[1]
    ttt_length: Positive
    step_loss_decay: Annotated[float, Field(gt=0, le=1)]
    target_model_name_or_path: str
    block_size: Positive | None = None

    def rules(self) -> list[tuple[str, bool, str]]:
        layers, drafted = self.num_hidden_layers, self.draft_num_hidden_layers
        contradiction = f"{layers} contradicts draft_num_hidden_layers={drafted}"
        return [*super().rules(), ("num_hidden_layers", layers == drafted, contradiction)]


class _Plain(_Eagle3Layout, PlainLayers):
    architectures: tuple[Literal["Qwen3Eagle3Model", "LlamaEagle3Model"]]


class _Gemma4(_Eagle3Layout, Gemma4Layers):
    architectures: tuple[Literal["Gemma4Eagle3Model"]]


def is_eagle3(values: Mapping[str, Any]) -> bool:
    """Whether a config.json says that it is of an EAGLE-3 drafter, of whichever form."""
    named = values.get("architectures")
    return isinstance(named, list) and len(named) == 1 and str(named[0]).endswith(_KIND)


def _layout_of(values: Mapping[str, Any]) -> type[_Eagle3Layout]:
    return _Gemma4 if values.get("architectures") == ["Gemma4Eagle3Model"] else _Plain


def eagle3_from_json(values: Mapping[str, Any]) -> Eagle3Config:
    """The EAGLE-3 drafter that a config.json describes.

    Raises:
        InputError: names every key that is missing or holds what this project's drafter does not compute.
    """
    layout = read_layout(_layout_of(values), values)
    config = Eagle3Config(
        **sizes_of(layout),
        layers=layout.draft_num_hidden_layers,
        block=layout.block_size or layout.ttt_length,
        target_name=layout.target_model_name_or_path,
        ttt_length=layout.ttt_length,
        step_loss_decay=layout.step_loss_decay,
    )
    check_rope(config)
    return config


def eagle3_to_json(config: Eagle3Config, target_config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of an EAGLE-3 drafter; `target_config` is the target's whole configuration, or that of its text."""
    return drafter_keys(config, target_config, _KIND, dtype) | {
        "draft_num_hidden_layers": config.layers,
        "ttt_length": config.ttt_length,
        "step_loss_decay": config.step_loss_decay,
        "target_model_name_or_path": config.target_name,
        "block_size": config.block,
    }


def eagle3_extra_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json holds beyond the layout, such as `dspark`."""
    return keys_beyond(_layout_of(values), values)
