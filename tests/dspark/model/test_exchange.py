"""Other file layouts: bit-equal round trips, keys as the engines read them, and everything else refused by name."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from dspark.errors import InputError
from dspark.model.config import DSparkConfig
from dspark.model.exchange import check_expressible, read_checkpoint, with_vocabulary, write_checkpoint
from dspark.model.vocabulary import Vocabulary
from tests.dspark.folders import FACTS, assert_equal, convert, edited, save, tensors_of, values_of
from tests.dspark.small import small_config, small_vocabulary

GOLDEN = Path("tests/golden")
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 16}
ROUND_TRIPS = [
    ("speculators", "vanilla", {}),
    ("speculators", "none", {}),
    ("speculators", "confidence_alone", {}),
    ("speculators", "vanilla", {"draft_vocab": 12, "rope": YARN}),
    ("specforge", "vanilla", {"taps": (0, 2), "rope": YARN}),
    ("specforge", "gated", {"taps": (0, 4), "confidence_with_markov": False}),
    ("specforge", "rnn", {"taps": (1,), "kv_heads": 4}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "head", "changes"), ROUND_TRIPS)
def test_there_and_back_gives_the_same_bits_and_keys(
    tmp_path: Path, name: str, head: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    config = small_config(head, **changes)
    source = save(tmp_path / "source", config, dtype)
    there = convert(source, tmp_path / "there", name)
    again = convert(there, tmp_path / "again", name)
    assert read_checkpoint(there).layout.name == name
    assert read_checkpoint(there).config == config
    assert (again / "config.json").read_bytes() == (there / "config.json").read_bytes()
    assert_equal(tensors_of(again), tensors_of(there))
    back = convert(there, tmp_path / "back", "deepspec", config)
    assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("case", "name"), [("dspark_vanilla", "speculators"), ("dspark_gated", "specforge")])
def test_drafters_of_the_published_implementation_go_there_and_back(tmp_path: Path, case: str, name: str) -> None:
    stored = load_file(GOLDEN / case / "case.safetensors")
    weights = {key.removeprefix("weights."): value for key, value in stored.items() if key.startswith("weights.")}
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(GOLDEN / case / "config.json", source)
    save_file(weights, source / "model.safetensors")
    there = convert(source, tmp_path / "there", name)
    found = read_checkpoint(there)
    found = with_vocabulary(found, Vocabulary(weights["embed_tokens.weight"], weights["lm_head.weight"]))
    write_checkpoint(tmp_path / "back", found, "deepspec", None, {})
    published, back = values_of(source), values_of(tmp_path / "back")
    assert {key: back[key] for key in published} == published
    assert back.keys() - published.keys() == {"dtype", "rope_theta", "rope_scaling"}
    assert_equal(tensors_of(tmp_path / "back"), weights)


def test_speculators_keys_are_those_that_vllm_reads(tmp_path: Path) -> None:
    source = save(tmp_path / "source", small_config(rope=YARN))
    values = values_of(convert(source, tmp_path / "out", "speculators"))
    layer = values.pop("transformer_layer_config")
    assert values == {
        "architectures": ["DSparkDraftModel"],
        "aux_hidden_state_layer_ids": [0, 3],
        "block_size": 3,
        "confidence_head_with_markov": True,
        "draft_vocab_size": 30,
        "dspark": FACTS,
        "dtype": "float32",
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": 5,
        "mask_token_id": 29,
        "num_anchors": 12,
        "num_target_layers": 6,
        "sample_from_anchor": True,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
        "speculators_model_type": "dspark",
        "tie_word_embeddings": False,
    }
    assert (layer["rope_theta"], layer["rope_scaling"]["factor"], layer["rope_parameters"]) == (5e5, 4.0, YARN)
    assert layer["max_position_embeddings"] == 64
    read: Any = Qwen3Config(**layer)
    assert (read.hidden_size, read.num_hidden_layers, read.head_dim, read.vocab_size) == (16, 2, 6, 30)
    assert {key: read.rope_parameters[key] for key in YARN} == YARN


def test_a_reduced_vocabulary_has_offsets_booleans_and_its_own_rows_of_the_head(tmp_path: Path) -> None:
    config = small_config(draft_vocab=12)
    out = convert(save(tmp_path / "source", config), tmp_path / "out", "speculators")
    tensors = tensors_of(out)
    assert tensors["d2t"].tolist() == list(range(12))  # kept id 2i at place i: offset i
    assert tensors["t2d"].tolist() == [token % 2 == 0 and token < 24 for token in range(30)]
    assert torch.equal(tensors["lm_head.weight"], small_vocabulary(config).head_VH[:24:2])
    assert torch.equal(tensors["embed_tokens.weight"], small_vocabulary(config).embedding_VH)
    assert values_of(out)["draft_vocab_size"] == 12
    whole = tensors_of(convert(save(tmp_path / "whole", small_config()), tmp_path / "out2", "speculators"))
    assert not {"d2t", "t2d"} & whole.keys()


def test_the_rows_of_another_target_do_not_complete_a_reduced_vocabulary(tmp_path: Path) -> None:
    config = small_config(draft_vocab=12)
    found = read_checkpoint(convert(save(tmp_path / "source", config), tmp_path / "out", "speculators"))
    with pytest.raises(InputError, match=r"embed_tokens\.weight of the drafter is not the target's"):
        with_vocabulary(found, small_vocabulary(config, seed=7))
    with pytest.raises(InputError, match="target with 30 tokens and width 16, this target has 40 and 16"):
        with_vocabulary(found, small_vocabulary(small_config(vocab=40)))


def test_specforge_keys_are_those_that_sglang_reads(tmp_path: Path) -> None:
    source = save(tmp_path / "source", small_config("gated", taps=(0, 2), rope=YARN))
    out = convert(source, tmp_path / "out", "specforge")
    values, published = values_of(out), values_of(source)
    assert values["dflash_config"] == {
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "target_layer_ids": [0, 2],
        "mask_token_id": 29,
        "markov_rank": 5,
        "markov_head_type": "gated",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    assert not {"target_layer_ids", "mask_token_id"} & values.keys()
    same = published.keys() - {"target_layer_ids", "mask_token_id"}
    assert {key: values[key] for key in same} == {key: published[key] for key in same}
    assert tensors_of(source).keys() - tensors_of(out).keys() == {"embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize(
    ("name", "config", "named"),
    [
        ("speculators", small_config("gated"), "markov_head_type=gated"),
        ("speculators", small_config("rnn"), "markov_head_type=rnn"),
        ("speculators", small_config(activation="gelu"), "hidden_act=gelu"),
        ("specforge", small_config("none", taps=(0,)), "markov_rank=0"),
        ("specforge", small_config(taps=(0,), draft_vocab=12), "draft_vocab_size=12"),
        ("specforge", small_config(), r"target_layer_ids=\[-1, 2\]"),
        ("specforge", small_config(taps=(0,), activation="gelu"), "hidden_act=gelu"),
    ],
)
def test_what_a_layout_or_its_engine_cannot_express_is_refused(
    tmp_path: Path, name: str, config: DSparkConfig, named: str
) -> None:
    found = read_checkpoint(save(tmp_path / "source", config))
    with pytest.raises(InputError, match=f"the layout {name} cannot express this drafter: .*{named}"):
        check_expressible(found, name)
    check_expressible(found, "deepspec")


LAYER = [
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "attention_bias", "rms_norm_eps", "initializer_range",
    "max_position_embeddings", "layer_types", "tie_word_embeddings",
]  # fmt: skip
HEADS = ["markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"]
NEEDED = {
    "deepspec": [*LAYER, *HEADS, "architectures", "block_size", "mask_token_id", "num_anchors", "num_target_layers",
                 "target_layer_ids"],
    "speculators": [*(f"transformer_layer_config.{key}" for key in LAYER), *HEADS, "transformer_layer_config",
                    "speculators_model_type", "aux_hidden_state_layer_ids", "block_size", "draft_vocab_size",
                    "mask_token_id", "num_target_layers", "sample_from_anchor", "speculators_config",
                    *(f"speculators_config.{key}" for key in ("algorithm", "default_proposal_method",
                      "proposal_methods", "verifier", "verifier.name_or_path", "verifier.architectures"))],
    "specforge": [*LAYER, *HEADS, "architectures", "block_size", "num_target_layers", "dflash_config",
                  *(f"dflash_config.{key}" for key in (*HEADS, "projector_type", "target_layer_ids", "mask_token_id"))],
}  # fmt: skip


def drop(values: dict[str, Any], path: str) -> None:
    *sections, key = path.split(".")
    for section in sections:
        values = values[section]
    del values[key]


@pytest.mark.parametrize("name", NEEDED)
def test_every_key_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    out = convert(save(tmp_path / "source", small_config(taps=(0, 2))), tmp_path / "out", name)
    for number, path in enumerate(NEEDED[name]):
        broken = edited(out, tmp_path / str(number), lambda values, _, path=path: drop(values, path))  # type: ignore[misc]
        with pytest.raises(InputError, match=path.replace(".", r"\.")):
            read_checkpoint(broken)
    both = edited(
        out,
        tmp_path / "rope",
        lambda values, _: [
            values.get("transformer_layer_config", values).pop(key) for key in ("rope_parameters", "rope_theta")
        ],
    )
    with pytest.raises(InputError, match="rope_theta"):
        read_checkpoint(both)


@pytest.mark.parametrize("name", NEEDED)
def test_every_tensor_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    config = small_config(taps=(0, 2)) if name == "specforge" else small_config(draft_vocab=12)
    out = convert(save(tmp_path / "source", config), tmp_path / "out", name)
    names = sorted(tensors_of(out))
    assert len(names) >= 29
    for number, tensor in enumerate(names):
        broken = edited(out, tmp_path / str(number), lambda _, tensors, tensor=tensor: tensors.pop(tensor))  # type: ignore[misc]
        with pytest.raises(InputError, match=f"{tensor} is missing".replace(".", r"\.")):
            read_checkpoint(broken)


@pytest.mark.parametrize("name", NEEDED)
def test_a_tensor_too_many_or_of_another_shape_or_type_is_named(tmp_path: Path, name: str) -> None:
    out = convert(save(tmp_path / "source", small_config(taps=(0, 2))), tmp_path / "out", name)
    for number, (tensor, value, named) in enumerate((
        ("module.fc.weight", torch.zeros(1), r"module\.fc\.weight is unexpected"),
        ("norm.weight", torch.zeros(17), r"norm\.weight has shape \[17\], needed \[16\]"),
        ("norm.weight", torch.zeros(16).half(), r"norm\.weight is float16, needed float32"),
        ("lm_head.weight", torch.zeros(29, 16), r"lm_head\.weight has shape \[29, 16\], needed \[30, 16\]"),
    )):  # fmt: skip
        broken = edited(
            out, tmp_path / str(number), lambda _, tensors, one=(tensor, value): tensors.update(dict([one]))  # type: ignore[misc]
        )  # fmt: skip
        with pytest.raises(InputError, match=named):
            read_checkpoint(broken)


def test_the_layout_that_is_named_must_be_the_one_that_is_there(tmp_path: Path) -> None:
    source = save(tmp_path / "source", small_config())
    assert read_checkpoint(source, "deepspec").layout.name == "deepspec"
    with pytest.raises(InputError, match="layout deepspec, not specforge"):
        read_checkpoint(source, "specforge")
    with pytest.raises(InputError, match="of no layout known here"):
        read_checkpoint(edited(source, tmp_path / "none", lambda values, _: values.clear()))


class Harmful:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.file,))


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    source = save(tmp_path / "source", small_config())
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful(tmp_path / "harm")))
    with pytest.raises(InputError, match=r"model\.safetensors is missing \(pytorch_model\.bin is not read"):
        read_checkpoint(source)
    assert not (tmp_path / "harm").exists()
