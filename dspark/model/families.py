"""What differs between target families, as values: a new family is a new value here, a preset and a test.

A `Form` is what a draft layer computes, a `Family` where a target of one `model_type` keeps the parts that a drafter
needs and which forms its drafters may have. Sizes are no part of either: they stand in the target's configuration.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from dspark.errors import InputError


@dataclass(frozen=True)
class Form:
    """A pre-norm block with grouped attention and a gated MLP; the setting `drafter.family` names one."""

    name: str
    qk_norm: bool = True  # a norm per head of queries and keys
    v_norm: bool = False  # a norm without scale per head of values
    sandwich: bool = False  # norms behind attention and on both sides of the MLP, and one factor for the whole layer
    fp32_scale: bool = False  # a norm's scale multiplies before the result is rounded, not after
    attention_scale: float | None = None  # of query times key; None: 1 / sqrt(head width)

    def __str__(self) -> str:
        return self.name


QWEN3_FORM = Form("qwen3")
LLAMA_FORM = Form("llama", qk_norm=False)
GEMMA4_FORM = Form("gemma4", v_norm=True, sandwich=True, fp32_scale=True, attention_scale=1.0)

FORMS = {form.name: form for form in (QWEN3_FORM, LLAMA_FORM, GEMMA4_FORM)}


@dataclass(frozen=True)
class Need:
    """A key of a target's configuration, the values of it that are supported, and what any other would mean."""

    key: str
    allowed: tuple[Any, ...]
    meaning: str


@dataclass(frozen=True)
class Family:
    """Where a transformers model of one `model_type` keeps what a drafter needs, and what its drafters look like."""

    model_type: str
    forms: tuple[Form, ...]  # of its draft layers, the default first
    decoder: str = "model"  # attribute that holds embed_tokens, layers and norm
    head: str = "lm_head"
    activation: str = "hidden_act"  # key that names the MLP's activation
    scaled_embedding: bool = False  # embeddings are multiplied by sqrt(H)
    layers_alike: bool = True  # any of the target's layers has the shape of a draft layer
    needs: tuple[Need, ...] = ()


# Drafters of Llama-shaped targets get query and key norms, for serving engines load them in the Qwen3 form.
_LLAMA_FORMS = (QWEN3_FORM, LLAMA_FORM)
_GEMMA4_NEEDS = (
    Need("enable_moe_block", (False,), "a mixture of experts"),
    Need("hidden_size_per_layer_input", (0, None), "inputs per layer"),
    Need("use_bidirectional_attention", (None, "vision"), "attention to later tokens"),
    Need("attention_bias", (False,), "biases in attention"),
)
# transformers runs these with shared keys and values only if they have inputs per layer too.
_GEMMA4_UNSHARED = (*_GEMMA4_NEEDS, Need("num_kv_shared_layers", (0,), "layers that share keys and values"))


def _gemma4(model_type: str, decoder: str, needs: tuple[Need, ...]) -> Family:
    return Family(
        model_type,
        forms=(GEMMA4_FORM,),
        decoder=decoder,
        activation="hidden_activation",
        scaled_embedding=True,
        layers_alike=False,
        needs=needs,
    )


FAMILIES = {
    family.model_type: family
    for family in (
        Family("qwen3", forms=(QWEN3_FORM,)),
        Family("qwen2", forms=_LLAMA_FORMS),
        Family("llama", forms=_LLAMA_FORMS),
        Family("mistral", forms=_LLAMA_FORMS),
        _gemma4("gemma4_text", "model", _GEMMA4_UNSHARED),
        _gemma4("gemma4", "model.language_model", _GEMMA4_UNSHARED),  # reads images and sound too
        _gemma4("gemma4_unified_text", "model", _GEMMA4_NEEDS),
        _gemma4("gemma4_unified", "model.language_model", _GEMMA4_NEEDS),
    )
}


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a target's configuration, be it whole or that of its text alone.

    Raises:
        InputError: the model type is not supported, or the target has a part that is not.
    """
    kind: Any = config.model_type
    if kind not in FAMILIES:
        raise InputError(
            f"target family {kind!r} is not supported (supported: {', '.join(sorted(FAMILIES))}): choose another target"
        )
    family, text = FAMILIES[kind], config.get_text_config()
    for need in family.needs:
        found = getattr(text, need.key, need.allowed[0])
        if found not in need.allowed:
            raise InputError(
                f"the target has {need.key}={found!r}, {need.meaning}, which is not supported in the family {kind}: "
                "choose another target"
            )
    return family


def layer_config(text: PreTrainedConfig, layer: int) -> PreTrainedConfig:
    """The text configuration as one decoder layer has it; the layers of Gemma4 differ in heads and head width."""
    return text.per_layer_config[layer] if text.is_heterogeneous else text


def head_shape(text: PreTrainedConfig, layer: int) -> tuple[int, int]:
    """Key/value heads and head width of one decoder layer."""
    own: Any = layer_config(text, layer)
    heads = own.num_attention_heads
    width = getattr(own, "head_dim", None) or own.hidden_size // heads
    return getattr(own, "num_key_value_heads", None) or heads, width


def embedding_scale(text: PreTrainedConfig) -> float:
    """What the target multiplies its embeddings by."""
    hidden: int = text.hidden_size
    return hidden**0.5 if family_of(text).scaled_embedding else 1.0


def soft_cap(text: PreTrainedConfig) -> float | None:
    """The bound c of a target whose logits x become c tanh(x / c)."""
    return getattr(text, "final_logit_softcapping", None)


def window(text: PreTrainedConfig) -> int | None:
    """Tokens that a target's sliding layers see, their own included; None: it has no such layers."""
    tokens: int | None = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    return tokens if kinds is None or "sliding_attention" in kinds else None
