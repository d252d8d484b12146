"""The layouts with a `dflash_config` section: SpecForge's, which SGLang serves, and that of ModelOpt's exports.

The drafter's keys stand in the section; a folder holds neither embedding nor head, which engines take from the target.
SpecForge's own form for serving repeats the keys of the heads at the top, where SGLang reads them. ModelOpt has other
names for the heads' tensors and for one key; it is read only.
"""

from collections.abc import Mapping
from typing import Any

from dspark.model.checkpoints import EMBEDDING, HEAD
from dspark.model.config import DraftConfig, DSparkConfig
from dspark.model.stored import ARCHITECTURE, HEADS, LAYER_KEYS, PUBLISHED_ANCHORS, Keys, Layout, Stored, Verifier

_SECTION = "dflash_config"
# Keys of the section that change nothing of what a drafter computes, or that are read below.
_KNOWN = {
    *HEADS, "attention_mode", "block_size", "causal", "confidence_head_alpha", "mask_token", "mask_token_id",
    "num_target_layers", "projector_type", "pure_draft_prefix_len", "sample_from_anchor", "shift_label",
    "target_layer_ids",
}  # fmt: skip
# Early files nest the heads once more.
_NESTED = "logit_head."
_FLAT_HEADS = {
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "gate_proj": "markov_head.gate_proj",
    "joint_proj": "markov_head.joint_proj",
    "confidence_proj": "confidence_head.proj",
}


def _has_section(values: Mapping[str, Any]) -> bool:
    return isinstance(values.get(_SECTION), Mapping)


def _is_modelopt(values: Mapping[str, Any]) -> bool:
    return _has_section(values) and "use_confidence_head" in values[_SECTION]


def _read(stored: Stored) -> Stored:
    """Published names, without embedding and head.

    Raises:
        InputError: names every key that is missing, contradicts another, or asks for what no drafter here computes.
    """
    keys = Keys(stored.values)
    section = keys.section(_SECTION)
    for key in (*LAYER_KEYS, "tie_word_embeddings", "num_target_layers"):
        keys.take(key)
    # Only DFlash files, which are older than the key, may lack it.
    if keys.take("architectures") == ["DFlashDraftModel"]:
        section.setdefault("projector_type", "dflash")
    else:
        keys.take(f"{_SECTION}.projector_type")
    projector = section.get("projector_type")
    if projector not in ("dspark", "dflash"):
        keys.faults.append(f"{_SECTION}.projector_type={projector!r}, needed 'dspark' or 'dflash'")
    heads = _heads(keys) if projector == "dspark" else {"markov_rank": 0, "enable_confidence_head": False}
    keys.faults += [
        f"{_SECTION}.{key}={section[key]!r} is nothing that a drafter here computes"
        for key in sorted(section.keys() - _KNOWN)
        if section[key]
    ]
    if section.get("causal"):
        keys.faults.append(f"{_SECTION}.causal=true: the slots of a block see each other here")
    next_token = projector == "dspark"
    for key in ("sample_from_anchor", "shift_label"):
        next_token = next_token and section.get(key) is not False
    block = keys.get("block_size") or section.get("block_size") or keys.take("block_size")
    taken = {key: keys.take(f"{_SECTION}.{key}") for key in ("target_layer_ids", "mask_token_id")}
    keys.check()
    values = {key: value for key, value in stored.values.items() if key not in (_SECTION, "auto_map", "torch_dtype")}
    values = values | heads | taken | {
        "architectures": [ARCHITECTURE],
        "block_size": block,
        "dtype": keys.get("dtype") or keys.get("torch_dtype"),
        "num_anchors": keys.get("num_anchors", PUBLISHED_ANCHORS),
    }  # fmt: skip
    tensors = {name.removeprefix(_NESTED): tensor for name, tensor in stored.tensors.items()}
    return Stored(values, tensors, next_token)


def _heads(keys: Keys) -> dict[str, Any]:
    """Keys of the heads from the section; SGLang's form repeats them at the top, where they must say the same."""
    heads = {key: keys.take(f"{_SECTION}.{key}") for key in HEADS}
    if keys.get("architectures") == [ARCHITECTURE]:
        for key in HEADS:
            keys.take(key)
    keys.faults += [
        f"{key}={keys.get(key)!r} contradicts {_SECTION}.{key}={value!r}"
        for key, value in heads.items()
        if keys.has(key) and keys.has(f"{_SECTION}.{key}") and keys.get(key) != value
    ]
    return heads


def _write(stored: Stored, _verifier: Verifier | None) -> Stored:
    values = dict(stored.values)
    heads = values["num_attention_heads"], values["num_key_value_heads"]
    values[_SECTION] = {
        "projector_type": "dspark",
        "attention_mode": "mha" if heads[0] == heads[1] else "gqa",
        "target_layer_ids": values.pop("target_layer_ids"),
        "mask_token_id": values.pop("mask_token_id"),
        **{key: values[key] for key in HEADS},
    }
    tensors = {name: tensor for name, tensor in stored.tensors.items() if name not in (EMBEDDING, HEAD)}
    return Stored(values, tensors)


def _refusals(config: DraftConfig) -> list[str]:
    assert isinstance(config, DSparkConfig)
    faults = []
    if config.markov_rank == 0:
        faults.append("markov_rank=0: SGLang needs a Markov head")
    if config.draft_vocab < config.vocab:
        faults.append(
            f"draft_vocab_size={config.draft_vocab}: the layout has no head of its own, and the target's proposes from "
            f"all {config.vocab} tokens"
        )
    if min(config.taps) < 0:
        faults.append(f"target_layer_ids={list(config.taps)}: SGLang numbers layers from 0, the embedding is none")
    if config.activation != "silu":
        faults.append(f"hidden_act={config.activation}: SGLang's draft layers compute silu alone")
    return faults


def _read_modelopt(stored: Stored) -> Stored:
    """The same with flat names of the heads; its confidence head always reads the Markov embedding."""
    keys = Keys(stored.values)
    section = keys.section(_SECTION)
    confidence = keys.take(f"{_SECTION}.use_confidence_head")
    keys.must(f"{_SECTION}.projector_type", "dspark")
    keys.must(f"{_SECTION}.shift_label", True)
    kind = keys.take(f"{_SECTION}.markov_head_type")
    needed = ["markov_w1.weight", "markov_w2.weight"]
    needed += [f"{name}.{part}" for name in _own(kind) for part in ("weight", "bias")]
    needed += ["confidence_proj.weight", "confidence_proj.bias"] if confidence is True else []
    keys.faults += [f"tensor {name} is missing" for name in needed if name not in stored.tensors]
    keys.check()
    del section["use_confidence_head"]
    section |= {"enable_confidence_head": confidence, "confidence_head_with_markov": confidence}
    tensors = {}
    for name, tensor in stored.tensors.items():
        module, _, part = name.rpartition(".")
        tensors[f"{_FLAT_HEADS[module]}.{part}" if module in _FLAT_HEADS else name] = tensor
    return _read(Stored({**stored.values, _SECTION: section}, tensors))


def _own(kind: Any) -> list[str]:
    """Modules that a kind of Markov head has beyond its two tables."""
    return {"gated": ["gate_proj"], "rnn": ["joint_proj"]}.get(str(kind), [])


SPECFORGE = Layout("specforge", DSparkConfig, _has_section, _read, _write, _refusals, vocabulary="none")
MODELOPT = Layout("modelopt", DSparkConfig, _is_modelopt, _read_modelopt, None, _refusals, vocabulary="none")
