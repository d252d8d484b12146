"""The keys of a drafter's config.json, checked: those of every drafter, of each way to write its layers, and DSpark's.

A file is read by a class of a kind and a way to write layers, such as `PlainLayout`. Strict: a text is no number, and
whatever the drafter would not compute is refused by its key.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from dspark.errors import InputError
from dspark.model.activations import is_activation
from dspark.model.families import GEMMA4_FORM, LLAMA_FORM, QWEN3_FORM, Form
from dspark.sections import Count, Positive, Weight

# How each form is called: the first part of the architecture, and the model type.
NAMES: dict[Form, tuple[str, str]] = {
    QWEN3_FORM: ("Qwen3", "qwen3"),
    LLAMA_FORM: ("Llama", "llama"),
    GEMMA4_FORM: ("Gemma4", "gemma4_text"),
}


def _known_activation(name: str) -> str:
    if not is_activation(name):
        raise ValueError(f"{name!r} is not known")
    return name


Activation = Annotated[str, AfterValidator(_known_activation)]


class Layout(BaseModel, ABC):
    """The keys of config.json that decide what a drafter computes; any others are kept in `model_extra`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    vocab_size: Positive
    draft_vocab_size: Positive | None = None
    hidden_size: Positive
    intermediate_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    attention_bias: Literal[False]
    rms_norm_eps: Weight
    initializer_range: Weight
    max_position_embeddings: Positive
    tie_word_embeddings: Literal[False]
    num_target_layers: Positive
    num_hidden_layers: Positive
    layer_types: tuple[Literal["full_attention"], ...]
    target_layer_ids: Annotated[tuple[Annotated[int, Field(ge=-1)], ...], Field(min_length=1)]

    @abstractmethod
    def form(self) -> dict[str, Any]:
        """The fields of `DraftConfig` that each form of draft layer writes in its own way."""

    def rules(self) -> list[tuple[str, bool, str]]:
        """(key, whether it holds, what is wrong) of each rule between keys."""
        last = self.num_target_layers - 1
        taps, kinds = list(self.target_layer_ids), len(self.layer_types)
        queries, keys = self.num_attention_heads, self.form()["kv_heads"]
        return [
            ("layer_types", kinds == self.num_hidden_layers, f"{kinds} types for {self.num_hidden_layers} layers"),
            ("target_layer_ids", max(taps) < last, f"{taps} must lie in -1..{last - 1}"),
            (
                "draft_vocab_size",
                (self.draft_vocab_size or 1) <= self.vocab_size,
                f"must be at most vocab_size={self.vocab_size}",
            ),
            ("num_attention_heads", queries % keys == 0, f"{queries} is no multiple of the {keys} key/value heads"),
        ]

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if faults := [f"{key}: {fault}" for key, holds, fault in self.rules() if not holds]:
            raise ValueError("; ".join(faults))
        return self


class PlainLayers(Layout):
    """Layers in Qwen3 form, or in that of Llama."""

    architectures: tuple[str]
    model_type: Literal["qwen3", "llama"]
    hidden_act: Activation
    rope_parameters: dict[str, Any] | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None

    def form(self) -> dict[str, Any]:
        form, prefix = next((form, prefix) for form, (prefix, kind) in NAMES.items() if kind == self.model_type)
        if not self.architectures[0].startswith(prefix):
            raise ValueError(f"model_type: {self.model_type!r} contradicts the architecture {self.architectures[0]}")
        return {
            "form": form,
            "kv_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "activation": self.hidden_act,
            "rope": rope_of(self.rope_parameters, self.rope_theta, self.rope_scaling),
        }


def rope_of(parameters: dict[str, Any] | None, theta: float | None, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Rotary parameters from whichever schema the file has. The base never falls back to a default.

    Raises:
        ValueError: no base, or two that contradict each other; for a validator to report.
    """
    rope, other = dict(parameters or scaling or {}), dict(scaling or {})
    for schema in (rope, other):
        if schema:
            schema.setdefault("rope_type", schema.pop("type", "default"))
    rope.setdefault("rope_type", "default")
    if differing := sorted(key for key, value in other.items() if rope.get(key) != value):
        raise ValueError(f"rope_scaling={scaling} contradicts rope_parameters={parameters} in {', '.join(differing)}")
    found = rope.setdefault("rope_theta", theta)
    if not isinstance(found, int | float) or found <= 0:
        raise ValueError(f"rope_theta: found {found!r} in rope_parameters and at the top, needed a positive number")
    if theta not in (None, found):
        raise ValueError(f"rope_theta={theta} contradicts rope_parameters, which says {found}")
    return rope


class _Rotation(BaseModel):
    """Rotary parameters of one kind of layer."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    rope_type: str
    rope_theta: Annotated[float, Field(gt=0)]


class _Rotations(BaseModel):
    """Rotary parameters by kind of layer; a draft layer rotates as full attention does."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    full_attention: _Rotation


class Gemma4Layers(Layout):
    """Layers in Gemma4 form: their heads are those of full attention, which have keys of their own."""

    model_type: Literal["gemma4_text"]
    target_model_type: str
    target_text_model_type: str
    hidden_activation: Activation
    attention_k_eq_v: bool
    global_head_dim: Positive
    num_global_key_value_heads: Positive | None
    final_logit_softcapping: Annotated[float, Field(gt=0)] | None
    rope_parameters: _Rotations
    enable_moe_block: Literal[False]
    hidden_size_per_layer_input: Literal[0]

    def form(self) -> dict[str, Any]:
        own_heads = self.num_global_key_value_heads if self.attention_k_eq_v else None
        return {
            "form": GEMMA4_FORM,
            "kv_heads": own_heads or self.num_key_value_heads,
            "head_dim": self.global_head_dim,
            "activation": self.hidden_activation,
            "rope": self.rope_parameters.full_attention.model_dump(),
            "shared_kv": self.attention_k_eq_v,
            "embedding_scale": self.hidden_size**0.5,
            "soft_cap": self.final_logit_softcapping,
        }


class DSparkLayout(Layout):
    """The keys of a DSpark drafter, however its layers are written."""

    block_size: Positive
    num_anchors: Positive
    mask_token_id: Count
    # The published code leaves out what belongs to a head that is not there.
    markov_rank: Count
    markov_head_type: Literal["vanilla", "gated", "rnn"] | None = None
    enable_confidence_head: bool
    confidence_head_with_markov: bool | None = None

    def rules(self) -> list[tuple[str, bool, str]]:
        without_type = self.markov_rank > 0 and self.markov_head_type is None
        without_input = self.enable_confidence_head and self.confidence_head_with_markov is None
        return [
            *super().rules(),
            ("mask_token_id", self.mask_token_id < self.vocab_size, f"must be below vocab_size={self.vocab_size}"),
            ("markov_head_type", not without_type, "missing, and markov_rank is not 0"),
            ("confidence_head_with_markov", not without_input, "missing, and enable_confidence_head is true"),
        ]


class PlainLayout(DSparkLayout, PlainLayers):
    """A DSpark drafter in Qwen3 form, or in that of Llama."""

    architectures: tuple[Literal["Qwen3DSparkModel", "LlamaDSparkModel"]]


class Gemma4Layout(DSparkLayout, Gemma4Layers):
    """A DSpark drafter in Gemma4 form."""

    architectures: tuple[Literal["Gemma4DSparkModel"]]


def layout_of(values: Mapping[str, Any]) -> type[DSparkLayout]:
    """The class that checks the values of a DSpark drafter."""
    return Gemma4Layout if values.get("architectures") == ["Gemma4DSparkModel"] else PlainLayout


Keys = TypeVar("Keys", bound=Layout)


def read_layout(layout: type[Keys], values: Mapping[str, Any]) -> Keys:
    """The keys of a config.json, checked.

    Raises:
        InputError: names every key that is missing or wrong.
    """
    try:
        # JSON is the strict mode that takes a list for a tuple.
        return layout.model_validate_json(json.dumps(dict(values)))
    except ValidationError as error:
        faults = [(".".join(map(str, fault["loc"])), fault["msg"]) for fault in error.errors(include_url=False)]
        raise InputError("; ".join(f"{key}: {text}" if key else text for key, text in faults)) from None
