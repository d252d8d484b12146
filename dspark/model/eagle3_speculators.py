"""EAGLE-3 drafters in the layout of vLLM and its speculators library; names of the tensors are the published ones.

As for DSpark, numbers of layers are one above our taps, and the head has rows for the draft vocabulary alone. vLLM
builds the layer of the Qwen3 form or that of Llama after the layer's `model_type`.
"""

from collections.abc import Mapping
from typing import Any

from dspark.model.checkpoints import RUN_KEY
from dspark.model.config import DraftConfig, Eagle3Config
from dspark.model.eagle3_stored import (
    PUBLISHED_DECAY,
    check_layer,
    layer_of,
    published,
    refusals,
    take_taps,
    take_target_layers,
    with_llama_defaults,
)
from dspark.model.families import LLAMA_FORM, QWEN3_FORM
from dspark.model.speculators import LAYER, proposed_tokens, speculators_config
from dspark.model.stored import Keys, Layout, Stored, Verifier, with_kept_rows

_TAPS = "eagle_aux_hidden_state_layer_ids"


def _matches(values: Mapping[str, Any]) -> bool:
    return values.get("speculators_model_type") == "eagle3"


def _read(stored: Stored) -> Stored:
    """Published names; a full head where the vocabulary is whole, else the rows of the kept tokens.

    Raises:
        InputError: names every key that is missing, contradicts another, or asks for what no drafter here computes.
    """
    section = stored.values.get(LAYER)
    layer = with_llama_defaults(section) if isinstance(section, dict) else {}
    keys = Keys({**stored.values, LAYER: layer} if isinstance(section, dict) else stored.values)
    keys.section(LAYER)
    check_layer(keys, f"{LAYER}.")
    keys.take("norm_before_residual", ": vLLM then takes true, and a drafter here has false")
    tokens = proposed_tokens(keys, "eagle3")
    taps, layers = take_taps(keys, _TAPS, shift=1), take_target_layers(keys)
    vocab = keys.take("draft_vocab_size")
    keys.check()
    drafter = {
        "dtype": keys.get("dtype") or keys.get("torch_dtype") or layer.get("dtype"),
        "draft_vocab_size": vocab,
        "target_layer_ids": taps,
        "block_size": tokens,
        "ttt_length": keys.get("ttt_length", tokens),
        "step_loss_decay": keys.get("step_loss_decay", PUBLISHED_DECAY),
        "target_model_name_or_path": keys.get("speculators_config.verifier.name_or_path"),
        **({RUN_KEY: keys.get(RUN_KEY)} if keys.has(RUN_KEY) else {}),
    }
    return Stored(published(layer, layers, drafter), stored.tensors)


def _write(stored: Stored, verifier: Verifier | None) -> Stored:
    assert verifier is not None, "this layout names its target"
    source, layer = stored.values, layer_of(stored.values)
    kept = ("dtype", "ttt_length", "step_loss_decay", RUN_KEY)
    values = {key: source[key] for key in kept if key in source} | {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": speculators_config(
            "eagle3", source.get("block_size") or source["ttt_length"], verifier
        ),
        LAYER: layer,
        "draft_vocab_size": source.get("draft_vocab_size", source["vocab_size"]),
        "num_target_layers": source["num_target_layers"],
        "target_hidden_size": source["hidden_size"],
        _TAPS: [tap + 1 for tap in source["target_layer_ids"]],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return Stored(values, with_kept_rows(stored))


def _refusals(config: DraftConfig) -> list[str]:
    faults = refusals(config)
    if config.form not in (QWEN3_FORM, LLAMA_FORM):
        faults.append(f"the form {config.form} of its layer: vLLM has one for the forms qwen3 and llama")
    return faults


EAGLE3_SPECULATORS = Layout("speculators", Eagle3Config, _matches, _read, _write, _refusals, vocabulary="kept")
