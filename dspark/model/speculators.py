"""The layout of vLLM and its speculators library: decoder keys in `transformer_layer_config`, the drafter's beside it.

Names of the tensors are the published ones. Two things are counted otherwise: `aux_hidden_state_layer_ids` is one above
our taps (it numbers what goes into a layer), and the head has rows for the draft vocabulary alone.
"""

from collections.abc import Mapping
from typing import Any

from dspark.model.checkpoints import RUN_KEY
from dspark.model.config import DraftConfig, DSparkConfig
from dspark.model.stored import (
    ARCHITECTURE,
    DRAFT_KEYS,
    HEADS,
    LAYER_KEYS,
    PUBLISHED_ANCHORS,
    Keys,
    Layout,
    Stored,
    Verifier,
    with_kept_rows,
)

LAYER = "transformer_layer_config"
_TAPS = "aux_hidden_state_layer_ids"
_METHODS = "speculators_config.proposal_methods"


def _matches(values: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in values


def speculators_config(algorithm: str, tokens: int, verifier: Verifier) -> dict[str, Any]:
    """What the layout says of every drafter: how many tokens it proposes, and for which target."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
        "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
    }


def proposed_tokens(keys: Keys, *algorithms: str) -> Any:
    """How many tokens the first method proposes, None where that is a fault; the other keys beside it are checked."""
    keys.must("speculators_config.algorithm", *algorithms)
    keys.take("speculators_config.default_proposal_method")
    keys.take("speculators_config.verifier.name_or_path")
    keys.take("speculators_config.verifier.architectures")
    methods = keys.take(_METHODS)
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    if keys.has(_METHODS) and "speculative_tokens" not in first:
        keys.faults.append(f"{_METHODS}: speculative_tokens is missing")
    return first.get("speculative_tokens")


def _read(stored: Stored) -> Stored:
    """Published names; a full head where the vocabulary is whole, else the rows of the kept tokens.

    Raises:
        InputError: names every key that is missing or contradicts another.
    """
    keys = Keys(stored.values)
    keys.must("speculators_model_type", "dspark", "dflash", "eagle3")  # the last has a reader of its own
    plain = keys.get("speculators_model_type") == "dflash"
    layer = keys.section(LAYER)
    for key in (*LAYER_KEYS, "tie_word_embeddings"):
        keys.take(f"{LAYER}.{key}")
    heads = {key: None if plain else keys.take(key) for key in HEADS}
    next_token = _next_token(keys, plain)
    taken = {key: keys.take(key) for key in ("block_size", "mask_token_id", "draft_vocab_size")}
    layers_of_target = keys.take("num_target_layers", ": this layout need not hold it, name the target")
    ids = keys.take(_TAPS)
    if keys.has(_TAPS) and not (isinstance(ids, list) and all(type(number) is int for number in ids)):
        keys.faults.append(f"{_TAPS}={ids!r}, needed a list of numbers")
    keys.check()
    heads = {"markov_rank": 0, "enable_confidence_head": False} if plain else heads
    whole = taken["draft_vocab_size"] == layer["vocab_size"]
    if whole:
        del taken["draft_vocab_size"]
    values = layer | heads | taken | {
        "architectures": [ARCHITECTURE],
        "dtype": keys.get("dtype") or keys.get("torch_dtype") or layer.get("dtype"),
        "num_target_layers": layers_of_target,
        "target_layer_ids": [number - 1 for number in ids],
        "num_anchors": keys.get("num_anchors", PUBLISHED_ANCHORS),
    }  # fmt: skip
    if keys.has(RUN_KEY):
        values[RUN_KEY] = keys.get(RUN_KEY)
    return Stored(values, stored.tensors, next_token)


def _next_token(keys: Keys, plain: bool) -> bool:
    """Whether slot 0 predicts too; what the layout proposes must agree with it."""
    # Old DFlash files lack the key, and all of them leave slot 0 out.
    if not (plain and not keys.has("sample_from_anchor")):
        keys.must("sample_from_anchor", True, False)
    next_token = keys.get("sample_from_anchor") is True
    tokens, block = proposed_tokens(keys, "dspark", "dflash"), keys.get("block_size")
    if isinstance(block, int) and isinstance(tokens, int) and not 1 <= tokens <= block - (not next_token):
        keys.faults.append(
            f"{_METHODS}: speculative_tokens={tokens} contradicts block_size={block} with "
            f"sample_from_anchor={str(next_token).lower()}"
        )
    return next_token


def _write(stored: Stored, verifier: Verifier | None) -> Stored:
    assert verifier is not None, "this layout names its target"
    source = stored.values
    values = {key: source[key] for key in DRAFT_KEYS if key in source and key != "target_layer_ids"} | {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_config": speculators_config("dspark", source["block_size"], verifier),
        LAYER: {key: value for key, value in source.items() if key not in DRAFT_KEYS},
        "draft_vocab_size": source.get("draft_vocab_size", source["vocab_size"]),
        _TAPS: [tap + 1 for tap in source["target_layer_ids"]],
        "sample_from_anchor": True,
        "tie_word_embeddings": False,
    }
    return Stored(values, with_kept_rows(stored))


def _refusals(config: DraftConfig) -> list[str]:
    assert isinstance(config, DSparkConfig)
    faults = []
    if config.markov_rank and config.markov_head != "vanilla":
        faults.append(f"markov_head_type={config.markov_head}: vLLM computes the vanilla Markov head alone")
    if config.activation != "silu":
        faults.append(f"hidden_act={config.activation}: vLLM's draft layers compute silu alone")
    return faults


SPECULATORS = Layout("speculators", DSparkConfig, _matches, _read, _write, _refusals, vocabulary="kept")
