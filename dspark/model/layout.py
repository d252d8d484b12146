"""config.json of a drafter, in the published layout: read strictly, written with every key that engines look for.

The file is the target's text configuration in Qwen3 form, with the drafter's keys beside it.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from transformers import PreTrainedConfig, Qwen3Config
from transformers.activations import ACT2FN

from dspark.config import Count, Positive, Weight
from dspark.errors import InputError
from dspark.model.config import DraftConfig, DSparkConfig
from dspark.model.layers import RotaryTable

Layout = TypeVar("Layout", bound="TextLayout")


class TextLayout(BaseModel):
    """The keys of config.json that decide what any drafter computes; others are kept in `model_extra`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    model_type: Literal["qwen3"]
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    vocab_size: Positive
    draft_vocab_size: Positive | None = None
    hidden_size: Positive
    intermediate_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    hidden_act: str
    attention_bias: Literal[False]
    rms_norm_eps: Weight
    initializer_range: Weight
    max_position_embeddings: Positive
    rope_parameters: dict[str, Any] | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: Literal[False]
    num_hidden_layers: Positive
    layer_types: tuple[Literal["full_attention"], ...]
    target_layer_ids: Annotated[tuple[Annotated[int, Field(ge=-1)], ...], Field(min_length=1)]

    @property
    def target_layers(self) -> int:
        """Layers of the target; a layout that says otherwise where they stand overrides this."""
        return self.num_hidden_layers

    def rules(self) -> list[tuple[str, bool, str]]:
        """(key, whether it holds, what is wrong) of each rule between keys."""
        last = self.target_layers - 1
        taps, kinds = list(self.target_layer_ids), len(self.layer_types)
        queries, keys = self.num_attention_heads, self.num_key_value_heads
        return [
            ("layer_types", kinds == self.num_hidden_layers, f"{kinds} types for {self.num_hidden_layers} layers"),
            ("target_layer_ids", max(taps) < last, f"{taps} must lie in -1..{last - 1}"),
            (
                "draft_vocab_size",
                (self.draft_vocab_size or 1) <= self.vocab_size,
                f"must be at most vocab_size={self.vocab_size}",
            ),
            ("num_attention_heads", queries % keys == 0, f"{queries} is no multiple of num_key_value_heads={keys}"),
            ("hidden_act", self.hidden_act in ACT2FN, f"{self.hidden_act!r} is not known"),
        ]

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if faults := [f"{key}: {fault}" for key, holds, fault in self.rules() if not holds]:
            raise ValueError("; ".join(faults))
        return self


class _DSparkLayout(TextLayout):
    architectures: tuple[Literal["Qwen3DSparkModel"]]
    num_target_layers: Positive
    block_size: Positive
    num_anchors: Positive
    mask_token_id: Count
    # The published code leaves out what belongs to a head that is not there.
    markov_rank: Count
    markov_head_type: Literal["vanilla", "gated", "rnn"] | None = None
    enable_confidence_head: bool
    confidence_head_with_markov: bool | None = None

    @property
    def target_layers(self) -> int:
        return self.num_target_layers

    def rules(self) -> list[tuple[str, bool, str]]:
        without_type = self.markov_rank > 0 and self.markov_head_type is None
        without_input = self.enable_confidence_head and self.confidence_head_with_markov is None
        return [
            *super().rules(),
            ("mask_token_id", self.mask_token_id < self.vocab_size, f"must be below vocab_size={self.vocab_size}"),
            ("markov_head_type", not without_type, "missing, and markov_rank is not 0"),
            ("confidence_head_with_markov", not without_input, "missing, and enable_confidence_head is true"),
        ]


def config_from_json(values: Mapping[str, Any]) -> DSparkConfig:
    """The DSpark drafter that a config.json describes.

    Raises:
        InputError: names every key that is missing or holds what this project's drafter does not compute.
    """
    layout = read_layout(_DSparkLayout, values)
    config = DSparkConfig(
        **sizes_of(layout),
        layers=layout.num_hidden_layers,
        block=layout.block_size,
        mask_token_id=layout.mask_token_id,
        markov_rank=layout.markov_rank,
        markov_head=layout.markov_head_type or "vanilla",
        confidence=layout.enable_confidence_head,
        # Without a Markov head there is no embedding that the confidence head could read.
        confidence_with_markov=bool(
            layout.enable_confidence_head and layout.confidence_head_with_markov and layout.markov_rank
        ),
    )
    check_rope(config)
    return config


def sizes_of(layout: TextLayout) -> dict[str, Any]:
    """What drafters of every kind have, but for their layers and their block."""
    return dict(
        hidden=layout.hidden_size,
        intermediate=layout.intermediate_size,
        heads=layout.num_attention_heads,
        kv_heads=layout.num_key_value_heads,
        head_dim=layout.head_dim,
        vocab=layout.vocab_size,
        draft_vocab=layout.draft_vocab_size or layout.vocab_size,
        norm_eps=layout.rms_norm_eps,
        max_positions=layout.max_position_embeddings,
        rope=_rope(layout),
        target_layers=layout.target_layers,
        taps=layout.target_layer_ids,
        activation=layout.hidden_act,
        init_std=layout.initializer_range,
    )


def check_rope(config: DraftConfig) -> None:
    """Raises InputError for rotary parameters that lack a key or hold a wrong value."""
    try:
        RotaryTable(config)
    except (KeyError, TypeError) as error:
        raise InputError(f"rope_parameters: {config.rope} lacks a key or has a wrong value: {error}") from error


def config_to_json(
    config: DSparkConfig, target_config: PreTrainedConfig, anchors: int, dtype: torch.dtype
) -> dict[str, Any]:
    """config.json of a DSpark drafter: the target's text configuration in Qwen3 form, and the drafter's keys."""
    return text_json(config, target_config, config.layers, dtype) | {
        "architectures": ["Qwen3DSparkModel"],
        "num_target_layers": config.target_layers,
        "block_size": config.block,
        "num_anchors": anchors,
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
    }


def text_json(config: DraftConfig, target_config: PreTrainedConfig, layers: int, dtype: torch.dtype) -> dict[str, Any]:
    """The keys of config.json that drafters of every kind have; `layers` is what `num_hidden_layers` says."""
    base = Qwen3Config(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        hidden_act=config.activation,
        max_position_embeddings=config.max_positions,
        initializer_range=config.init_std,
        rms_norm_eps=config.norm_eps,
        rope_parameters=dict(config.rope),
        layer_types=["full_attention"] * layers,
        tie_word_embeddings=False,
        attention_bias=False,
        bos_token_id=target_config.bos_token_id,
        eos_token_id=target_config.eos_token_id,
        pad_token_id=target_config.pad_token_id,
    )
    scaling = {key: value for key, value in config.rope.items() if key != "rope_theta"}
    return base.to_diff_dict() | {
        "dtype": dtype_name(dtype),
        # Engines read the one schema of rotary parameters or the other.
        "rope_parameters": dict(config.rope),
        "rope_theta": config.rope["rope_theta"],
        "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
        **({"draft_vocab_size": config.draft_vocab} if config.draft_vocab < config.vocab else {}),
        "target_layer_ids": list(config.taps),
    }


def extra_keys(values: Mapping[str, Any], layout: type[TextLayout] = _DSparkLayout) -> dict[str, Any]:
    """What a config.json holds beyond a layout, such as `dspark`."""
    known = layout.model_fields.keys() | Qwen3Config().to_dict().keys()
    return {key: value for key, value in values.items() if key not in known}


def read_layout(kind: type[Layout], values: Mapping[str, Any]) -> Layout:
    """The keys of a config.json, checked.

    Raises:
        InputError: names every key that is missing or wrong.
    """
    try:
        # JSON is the strict mode that takes a list for a tuple.
        return kind.model_validate_json(json.dumps(dict(values)))
    except ValidationError as error:
        faults = [(".".join(map(str, fault["loc"])), fault["msg"]) for fault in error.errors(include_url=False)]
        raise InputError("; ".join(f"{key}: {text}" if key else text for key, text in faults)) from None


def _rope(layout: TextLayout) -> dict[str, Any]:
    """Rotary parameters from whichever schema the file has. The base never falls back to a default."""
    rope = dict(layout.rope_parameters or layout.rope_scaling or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    theta = rope.setdefault("rope_theta", layout.rope_theta)
    if not isinstance(theta, int | float) or theta <= 0:
        raise InputError(f"rope_theta: found {theta!r} in rope_parameters and at the top, needed a positive number")
    if layout.rope_theta not in (None, theta):
        raise InputError(f"rope_theta={layout.rope_theta} contradicts rope_parameters, which says {theta}")
    return rope


def dtype_name(dtype: torch.dtype) -> str:
    """The name by which config.json calls a type: `bfloat16`."""
    return str(dtype).removeprefix("torch.")
