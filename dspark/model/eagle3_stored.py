"""EAGLE-3 drafters between the published layout and those of engines: what all of these have in common.

An engine's layer is ours: attention over the normed embedding beside the normed feature, the residual from the feature
itself, the state before `norm` as the next feature. Keys that ask for something else are refused by name.
"""

from collections.abc import Mapping
from typing import Any

from dspark.model.checkpoints import RUN_KEY
from dspark.model.config import DraftConfig
from dspark.model.stored import LAYER_KEYS, Keys

# What a drafter has beyond the configuration of its layer.
DRAFT_KEYS = (
    "architectures", "dtype", "draft_vocab_size", "num_target_layers", "target_layer_ids", "block_size",
    "draft_num_hidden_layers", "ttt_length", "step_loss_decay", "target_model_name_or_path", RUN_KEY,
)  # fmt: skip
ARCHITECTURES = {"qwen3": "Qwen3Eagle3Model", "llama": "LlamaEagle3Model"}  # published, by model type
# How the published drafters were trained: other layouts need not say so, and nothing that is computed depends on it.
PUBLISHED_STEPS, PUBLISHED_DECAY = 7, 0.8
# Keys of later variants, and what they change.
_VARIANTS = {
    "norm_before_residual": "the residual is the normed feature, in a drafter here the feature itself",
    "norm_before_fc": "a norm over all taps",
    "eagle_config.norm_before_fc": "a norm over all taps",
    "fc_norm": "a norm per tap",
    "use_aux_norm": "a norm per tap",
    "norm_output": "the next feature is the state behind norm, in a drafter here the one before it",
    "bias": "biases in fc",
    "mlp_bias": "biases in the MLP",
}


def with_llama_defaults(layer: Mapping[str, Any]) -> dict[str, Any]:
    """The layer's keys, with what a Llama configuration leaves out where it is the usual."""
    if layer.get("model_type") != "llama":
        return dict(layer)
    usual: dict[str, Any] = {"attention_bias": False, "layer_types": ["full_attention"]}
    width, heads = layer.get("hidden_size"), layer.get("num_attention_heads")
    if isinstance(width, int) and isinstance(heads, int) and heads > 0:
        usual["head_dim"] = width // heads
    return {**usual, **layer}


def check_layer(keys: Keys, section: str = "") -> None:
    """Notes every key of the one layer that is missing, and every one that changes what is computed."""
    for key in (*LAYER_KEYS, "tie_word_embeddings"):
        keys.take(section + key)
    keys.must(f"{section}model_type", *ARCHITECTURES)
    keys.must(f"{section}num_hidden_layers", 1)
    keys.must(f"{section}layer_types", ["full_attention"])
    keys.faults += [f"{key}={keys.get(key)!r}: {meaning}" for key, meaning in _VARIANTS.items() if keys.get(key)]
    if keys.get("target_hidden_size") not in (None, width := keys.get(f"{section}hidden_size")):
        keys.faults.append(
            f"target_hidden_size={keys.get('target_hidden_size')!r} and hidden_size={width!r}: a drafter here is as "
            "wide as its target"
        )


def take_taps(keys: Keys, path: str, shift: int) -> list[int]:
    """Our numbers of the layers whose states are read; `shift`: how far the layout's numbers lie above them."""
    ids = keys.take(path, ": engines then read layers of their own choice, write down which")
    if not isinstance(ids, list) or not all(type(number) is int for number in ids) or sorted(set(ids)) != ids:
        if keys.has(path):
            keys.faults.append(f"{path}={ids!r}, needed ascending numbers, for engines read the layers in their order")
        return []
    return [number - shift for number in ids]


def take_target_layers(keys: Keys) -> int:
    """How many layers the target has; 0 where that is a fault."""
    layers = keys.take("num_target_layers", ": this layout need not hold it, name the target")
    if keys.has("num_target_layers") and type(layers) is not int:
        keys.faults.append(f"num_target_layers={layers!r}, needed a number")
    return layers if type(layers) is int else 0


def published(layer: Mapping[str, Any], target_layers: int, drafter: Mapping[str, Any]) -> dict[str, Any]:
    """The published keys from those of the one layer and of the drafter."""
    values = dict(layer) | {
        "architectures": [ARCHITECTURES[layer["model_type"]]],
        "num_target_layers": target_layers,
        "draft_num_hidden_layers": 1,
        **drafter,
    }  # fmt: skip
    if values.get("draft_vocab_size") in (None, values["vocab_size"]):
        del values["draft_vocab_size"]
    return values


def layer_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the one layer out of the published ones."""
    return {key: value for key, value in values.items() if key not in DRAFT_KEYS}


def refusals(config: DraftConfig) -> list[str]:
    """What engines of both layouts would compute otherwise."""
    return [] if config.activation == "silu" else [f"hidden_act={config.activation}: engines compute silu alone"]
