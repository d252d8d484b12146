"""config.json of a DSpark drafter, in the published layout: read strictly, with every key that engines look for.

The file is the target's text configuration in the form of the draft layers, Qwen3 or Gemma4, with the drafter's keys
beside it. Layers of the native Llama form, which no engine loads, are named so and kept out of exports.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Gemma4TextConfig, PreTrainedConfig, Qwen3Config

from dspark.errors import InputError
from dspark.model.config import DraftConfig, DSparkConfig
from dspark.model.families import GEMMA4_FORM, LLAMA_FORM, head_shape
from dspark.model.layers import RotaryTable
from dspark.model.layout_keys import NAMES, Layout, layout_of, read_layout


def config_from_json(values: Mapping[str, Any]) -> DSparkConfig:
    """The DSpark drafter that a config.json describes.

    Raises:
        InputError: names every key that is missing or holds what this project's drafter does not compute.
    """
    layout = read_layout(layout_of(values), values)
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


def sizes_of(layout: Layout) -> dict[str, Any]:
    """What drafters of every kind have, but for their layers and their block."""
    return dict(
        hidden=layout.hidden_size,
        intermediate=layout.intermediate_size,
        heads=layout.num_attention_heads,
        vocab=layout.vocab_size,
        draft_vocab=layout.draft_vocab_size or layout.vocab_size,
        norm_eps=layout.rms_norm_eps,
        max_positions=layout.max_position_embeddings,
        target_layers=layout.num_target_layers,
        taps=layout.target_layer_ids,
        init_std=layout.initializer_range,
        **layout.form(),
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
    """config.json of a DSpark drafter: the target's configuration in the form of the draft layers, and its own keys.

    `target_config` is the target's whole configuration, or that of its text alone.
    """
    return drafter_keys(config, target_config, "DSparkModel", dtype) | {
        "block_size": config.block,
        "num_anchors": anchors,
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
    }  # fmt: skip


def drafter_keys(config: DraftConfig, target_config: PreTrainedConfig, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """What drafters of every kind write: the target's configuration in the form of their layers, and what differs.

    `kind` is the second part of the architecture, behind the form's name.
    """
    gemma4 = config.form == GEMMA4_FORM
    base = _gemma4_base(target_config) if gemma4 else _plain_base(config, target_config)
    name, model_type = NAMES[config.form]
    return base | {
        "architectures": [f"{name}{kind}"],
        "model_type": model_type,
        "dtype": dtype_name(dtype),
        "num_target_layers": config.target_layers,
        "num_hidden_layers": config.layers,
        "layer_types": ["full_attention"] * config.layers,
        "tie_word_embeddings": False,
        "attention_bias": False,
        **({"draft_vocab_size": config.draft_vocab} if config.draft_vocab < config.vocab else {}),
        "target_layer_ids": list(config.taps),
    }


def check_servable(config: DraftConfig) -> None:
    """Refuses a drafter that serving engines cannot load: what an export asks first.

    Raises:
        InputError: the draft layers have no published form.
    """
    if config.form == LLAMA_FORM:
        raise InputError(
            "the draft layers have the native Llama form, which no serving engine loads: train with "
            "drafter.family=qwen3 to export, or keep to `dspark evaluate` and `dspark generate`"
        )


def _plain_base(config: DraftConfig, target_config: PreTrainedConfig) -> dict[str, Any]:
    """The target's configuration as one of Qwen3, which that of Llama differs from in its name alone."""
    text = target_config.get_text_config()
    base = Qwen3Config(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        hidden_act=config.activation,
        max_position_embeddings=config.max_positions,
        initializer_range=config.init_std,
        rms_norm_eps=config.norm_eps,
        rope_parameters=dict(config.rope),
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
    )
    return base.to_diff_dict() | rope_keys(config)


def rope_keys(config: DraftConfig) -> dict[str, Any]:
    """Rotary parameters in both schemas: engines read the one or the other. Gemma4 has one alone, by kind of layer."""
    if config.form == GEMMA4_FORM:
        return {}
    scaling = {key: value for key, value in config.rope.items() if key != "rope_theta"}
    return {
        "rope_parameters": dict(config.rope),
        "rope_theta": config.rope["rope_theta"],
        "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
    }


def _gemma4_base(target_config: PreTrainedConfig) -> dict[str, Any]:
    text: Any = target_config.get_text_config()
    kv_heads, head_dim = head_shape(text, text.num_hidden_layers - 1)
    # transformers lists the heads of full attention layer by layer, engines read them from two keys.
    base = {key: value for key, value in text.to_diff_dict().items() if key != "per_layer_config"}
    return base | {
        "target_model_type": target_config.model_type,
        "target_text_model_type": text.model_type,
        "global_head_dim": head_dim,
        "num_global_key_value_heads": kv_heads if text.attention_k_eq_v else None,
        # Draft layers are dense and keep their own keys and values, whatever the target's layers do.
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
    }


def extra_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a DSpark drafter's config.json holds beyond the layout, such as `dspark`."""
    return keys_beyond(layout_of(values), values)


def keys_beyond(layout: type[Layout], values: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json holds beyond the keys of this layout and those of any target."""
    base = {**Qwen3Config().to_dict(), **Gemma4TextConfig().to_dict()}
    known = layout.model_fields.keys() | base.keys()
    return {key: value for key, value in values.items() if key not in known}


def dtype_name(dtype: torch.dtype) -> str:
    """The name by which config.json calls a type: `bfloat16`."""
    return str(dtype).removeprefix("torch.")
