"""EAGLE-3 drafters in the layout of SpecForge, which SGLang serves: a Llama configuration with an `eagle_config`.

The layer is called `midlayer`; a folder holds the head's rows for the draft tokens and always both maps, but no
embedding, which engines take from the target. Numbers of layers are our taps.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dspark.model.checkpoints import EMBEDDING, MAPS
from dspark.model.config import DraftConfig, Eagle3Config
from dspark.model.eagle3_stored import (
    PUBLISHED_DECAY,
    PUBLISHED_STEPS,
    check_layer,
    published,
    refusals,
    take_taps,
    take_target_layers,
    with_llama_defaults,
)
from dspark.model.families import LLAMA_FORM
from dspark.model.stored import Keys, Layout, Stored, Verifier, with_kept_rows

_ARCHITECTURE = "LlamaForCausalLMEagle3"
_SECTION = "eagle_config"
_TAPS = f"{_SECTION}.eagle_aux_hidden_state_layer_ids"
_OURS, _THEIRS = "layers.0.", "midlayer."
_PARTS = (
    "hidden_norm", "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
    "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
# Keys of this layout that the published one has none for.
_OWN = (_SECTION, "num_target_layers", "target_hidden_size", "auto_map", "torch_dtype")


def _matches(values: Mapping[str, Any]) -> bool:
    return values.get("architectures") == [_ARCHITECTURE] or isinstance(values.get(_SECTION), Mapping)


def _read(stored: Stored) -> Stored:
    """Published names, without the embedding; of a reduced vocabulary the rows of the head for the kept tokens.

    Raises:
        InputError: names every key and tensor that is missing, contradicts another, or asks for what no drafter here
            computes.
    """
    keys = Keys(with_llama_defaults(stored.values))
    keys.must("architectures", [_ARCHITECTURE])
    keys.section(_SECTION)
    check_layer(keys)
    keys.must("model_type", "llama")
    # Files may leave the key out, for engines take true then.
    if keys.has(f"{_SECTION}.use_aux_hidden_state"):
        keys.must(f"{_SECTION}.use_aux_hidden_state", True)
    taps, layers = take_taps(keys, _TAPS, shift=0), take_target_layers(keys)
    vocab = keys.take("draft_vocab_size")
    name = keys.take("target_model_name_or_path", ": this layout need not hold it, name the target")
    whole = vocab in (None, keys.get("vocab_size"))
    if whole:
        keys.faults += _map_faults(stored.tensors)
    tensors = {
        name.replace(_THEIRS, _OURS, 1) if name.startswith(_THEIRS) else name: tensor
        for name, tensor in stored.tensors.items()
        if not (whole and name in MAPS)
    }
    # Named as the file names them; SGLang takes the published names too.
    keys.faults += [
        f"tensor {_THEIRS}{part}.weight is missing" for part in _PARTS if f"{_OURS}{part}.weight" not in tensors
    ]
    keys.check()
    steps = keys.get("ttt_length", PUBLISHED_STEPS)
    drafter = {
        "dtype": keys.get("dtype") or keys.get("torch_dtype"),
        "draft_vocab_size": vocab,
        "target_layer_ids": taps,
        "block_size": keys.get("block_size", steps),
        "ttt_length": steps,
        "step_loss_decay": keys.get("step_loss_decay", PUBLISHED_DECAY),
        "target_model_name_or_path": name,
    }
    layer = {key: value for key, value in keys.values.items() if key not in _OWN}
    return Stored(published(layer, layers, drafter), tensors)


def _map_faults(tensors: Mapping[str, Tensor]) -> list[str]:
    """What is wrong with the maps of a whole vocabulary, which must keep every token in its place."""
    missing = [name for name in MAPS if name not in tensors]
    if len(missing) == len(MAPS):
        return []  # SGLang needs none
    if missing:
        return [f"tensor {name} is missing" for name in missing]
    if bool(tensors["d2t"].any()) or not bool(tensors["t2d"].all()):
        return ["tensors d2t and t2d leave tokens out, and draft_vocab_size is the whole vocabulary"]
    return []


def _write(stored: Stored, _verifier: Verifier | None) -> Stored:
    source = stored.values
    vocab: int = source["vocab_size"]
    values = {key: value for key, value in source.items() if key != "draft_num_hidden_layers"} | {
        "architectures": [_ARCHITECTURE],
        "draft_vocab_size": source.get("draft_vocab_size", vocab),
        "target_hidden_size": source["hidden_size"],
        _SECTION: {"eagle_aux_hidden_state_layer_ids": source["target_layer_ids"], "use_aux_hidden_state": True},
    }  # fmt: skip
    del values["target_layer_ids"]
    tensors = with_kept_rows(stored)
    if "draft_vocab_size" not in source:
        tensors |= {"d2t": torch.zeros(vocab, dtype=MAPS["d2t"]), "t2d": torch.ones(vocab, dtype=MAPS["t2d"])}
    return Stored(
        values,
        {
            name.replace(_OURS, _THEIRS, 1) if name.startswith(_OURS) else name: tensor
            for name, tensor in tensors.items()
            if name != EMBEDDING
        },
    )


def _refusals(config: DraftConfig) -> list[str]:
    faults = refusals(config)
    if config.form != LLAMA_FORM:
        faults.append(
            f"the form {config.form} of its layer: SGLang's has no norms of queries and keys and would leave them out, "
            "train with drafter.family=llama"
        )
    if min(config.taps) < 0:
        faults.append(f"target_layer_ids={list(config.taps)}: SGLang numbers layers from 0, the embedding is none")
    if len(config.taps) == 1:
        faults.append(f"target_layer_ids={list(config.taps)}: SGLang leaves fc out where there is one tap alone")
    return faults


EAGLE3_SPECFORGE = Layout("specforge", Eagle3Config, _matches, _read, _write, _refusals, vocabulary="rows")
