"""config.json of an EAGLE-3 drafter: the target's text configuration with its layers, and the drafter's keys.

The published layout has no key for how many tokens a round drafts, so `block_size` is our own addition; a file without
it drafts as many as the drafter was trained for.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from transformers import PreTrainedConfig

from dspark.model.config import Eagle3Config
from dspark.model.families import LLAMA_FORM, QWEN3_FORM
from dspark.model.layout import check_rope, drafter_keys, keys_beyond, plain_base, sizes_of
from dspark.model.layout_keys import Activation, Layout, read_layout, rope_of
from dspark.sections import Positive

# Architecture and model type of each form.
_NAMES = {QWEN3_FORM: ("Qwen3Eagle3Model", "qwen3"), LLAMA_FORM: ("LlamaEagle3Model", "llama")}


class _Eagle3Layout(Layout):
    architectures: tuple[Literal["Qwen3Eagle3Model", "LlamaEagle3Model"]]
    model_type: Literal["qwen3", "llama"]
    hidden_act: Activation
    rope_parameters: dict[str, Any] | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    draft_num_hidden_layers: Literal[1]
    ttt_length: Positive
    step_loss_decay: Annotated[float, Field(gt=0, le=1)]
    target_model_name_or_path: str
    block_size: Positive | None = None

    @property
    def target_layers(self) -> int:
        return self.num_hidden_layers

    def form(self) -> dict[str, Any]:
        named = (self.architectures[0], self.model_type)
        form = next((form for form, names in _NAMES.items() if names == named), None)
        if form is None:
            raise ValueError(f"model_type: {self.model_type!r} contradicts the architecture {self.architectures[0]}")
        return {
            "form": form,
            "kv_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "activation": self.hidden_act,
            "rope": rope_of(self.rope_parameters, self.rope_theta, self.rope_scaling),
        }


def is_eagle3(values: Mapping[str, Any]) -> bool:
    """Whether a config.json says that it is of an EAGLE-3 drafter, of whichever form."""
    return values.get("architectures") in [[architecture] for architecture, _ in _NAMES.values()]


def eagle3_from_json(values: Mapping[str, Any]) -> Eagle3Config:
    """The EAGLE-3 drafter that a config.json describes.

    Raises:
        InputError: names every key that is missing or holds what this project's drafter does not compute.
    """
    layout = read_layout(_Eagle3Layout, values)
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
    layers = config.target_layers
    return plain_base(config, target_config, layers) | drafter_keys(config, layers, dtype) | {
        "architectures": [_NAMES[config.form][0]],
        "draft_num_hidden_layers": config.layers,
        "ttt_length": config.ttt_length,
        "step_loss_decay": config.step_loss_decay,
        "target_model_name_or_path": config.target_name,
        "block_size": config.block,
    }  # fmt: skip


def eagle3_extra_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json holds beyond the layout, such as `dspark`."""
    return keys_beyond(_Eagle3Layout, values)
