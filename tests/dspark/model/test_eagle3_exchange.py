"""EAGLE-3 in the layouts of engines: bit-equal round trips, keys as the engines read them, faults by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from dspark.errors import InputError
from dspark.model.config import Eagle3Config
from dspark.model.eagle3 import new_eagle3_drafter
from dspark.model.exchange import check_expressible, read_checkpoint, with_vocabulary, write_checkpoint
from dspark.model.families import GEMMA4_FORM, LLAMA_FORM, QWEN3_FORM, Form
from dspark.model.inherit import start_from_checkpoint
from tests.dspark.folders import FACTS, assert_equal, convert, edited, save_eagle3, tensors_of, values_of
from tests.dspark.small import SMALL_EAGLE3, small_vocabulary

ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
]  # fmt: skip
NATIVE = replace(SMALL_EAGLE3, target_name="org/target", taps=(0, 2, 4), form=LLAMA_FORM)
HELD = [("speculators", QWEN3_FORM), ("speculators", LLAMA_FORM), ("specforge", LLAMA_FORM)]


@hypothesis.settings(max_examples=16, deadline=None)
@hypothesis.given(
    case=st.sampled_from(HELD),
    taps=st.lists(st.integers(0, 4), unique=True, min_size=2).map(sorted),
    draft_vocab=st.sampled_from([30, 12]),
    rope=st.sampled_from(ROPES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_there_and_back_gives_the_same_bits_and_keys(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[str, Form],
    taps: list[int],
    draft_vocab: int,
    rope: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    name, form = case
    config = replace(NATIVE, form=form, taps=tuple(taps), draft_vocab=draft_vocab, rope=rope)
    tmp_path = tmp_path_factory.mktemp("round")
    source = save_eagle3(tmp_path / "source", config, dtype)
    there = convert(source, tmp_path / "there", name)
    again = convert(there, tmp_path / "again", name)
    found = read_checkpoint(there)
    assert (found.layout.name, found.config) == (name, config)
    assert (again / "config.json").read_bytes() == (there / "config.json").read_bytes()
    assert_equal(tensors_of(again), tensors_of(there))
    back = convert(there, tmp_path / "back", "deepspec", config, check=False)
    assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_speculators_keys_are_those_that_vllm_reads(tmp_path: Path) -> None:
    config = replace(NATIVE, form=QWEN3_FORM, taps=(-1, 2), draft_vocab=12)
    out = convert(save_eagle3(tmp_path / "source", config), tmp_path / "out", "speculators")
    values = values_of(out)
    layer = values.pop("transformer_layer_config")
    assert values == {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": 12,
        "dspark": FACTS,
        "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": [0, 3],
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "num_target_layers": 6,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
        "speculators_model_type": "eagle3",
        "step_loss_decay": 0.5,
        "target_hidden_size": 16,
        "tie_word_embeddings": False,
        "ttt_length": 4,
    }
    wanted = {"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["full_attention"], "vocab_size": 30,
              "rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": ROPES[0]}  # fmt: skip
    assert {key: layer[key] for key in wanted} == wanted
    tensors = tensors_of(out)
    assert tensors["d2t"].tolist() == list(range(12))  # kept id 2i at place i: offset i
    assert torch.equal(tensors["lm_head.weight"], small_vocabulary(config).head_VH[:24:2])
    assert not {"midlayer.hidden_norm.weight", "target_layer_ids"} & (tensors.keys() | values.keys())


@pytest.mark.parametrize("draft_vocab", [30, 12])
def test_specforge_keys_and_tensors_are_those_that_sglang_reads(tmp_path: Path, draft_vocab: int) -> None:
    config = replace(NATIVE, draft_vocab=draft_vocab)
    out = convert(save_eagle3(tmp_path / "source", config), tmp_path / "out", "specforge")
    values, tensors = values_of(out), tensors_of(out)
    wanted = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 16,
        "draft_vocab_size": draft_vocab, "target_hidden_size": 16, "tie_word_embeddings": False, "vocab_size": 30,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True},
        "rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": ROPES[0], "num_target_layers": 6,
    }  # fmt: skip
    assert {key: values[key] for key in wanted} == wanted
    layer = {"hidden_norm", "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
             "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}  # fmt: skip
    names = {"fc", "norm", "lm_head"} | {f"midlayer.{name}" for name in layer}
    assert tensors.keys() == {f"{name}.weight" for name in names} | {"d2t", "t2d"}
    kept = range(30) if draft_vocab == 30 else range(0, 24, 2)
    assert (torch.arange(draft_vocab) + tensors["d2t"]).tolist() == list(kept)
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert tensors["t2d"].nonzero()[:, 0].tolist() == list(kept)
    assert torch.equal(tensors["lm_head.weight"], small_vocabulary(config).head_VH[list(kept)])


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("specforge", {"form": QWEN3_FORM}, r"no norms of queries and keys .* train with drafter\.family=llama"),
        ("specforge", {"taps": (-1, 2)}, r"target_layer_ids=\[-1, 2\]: SGLang numbers layers from 0"),
        ("specforge", {"taps": (2,)}, r"target_layer_ids=\[2\]: SGLang leaves fc out"),
        ("specforge", {"activation": "gelu"}, "hidden_act=gelu"),
        ("speculators", {"activation": "gelu"}, "hidden_act=gelu"),
        ("speculators", {"form": GEMMA4_FORM}, "the form gemma4 of its layer"),
        ("deepspec", {}, "the Llama form, for which engines have no published name"),
    ],
)
def test_what_a_layout_or_its_engine_cannot_express_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], named: str
) -> None:
    found = read_checkpoint(save_eagle3(tmp_path / "source", NATIVE))
    with pytest.raises(InputError, match=f"the layout {name} cannot express this drafter: .*{named}"):
        check_expressible(replace(found, config=replace(NATIVE, **changes)), name)


LAYER = [
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "rms_norm_eps", "initializer_range", "max_position_embeddings",
    "tie_word_embeddings",
]  # fmt: skip
QWEN3_LAYER = [*LAYER, "head_dim", "attention_bias", "layer_types"]  # which a Llama file may leave out
NEEDED = {
    "speculators": [
        *(f"transformer_layer_config.{key}" for key in QWEN3_LAYER), "transformer_layer_config", "draft_vocab_size",
        "speculators_config", "num_target_layers", "eagle_aux_hidden_state_layer_ids", "norm_before_residual",
        *(f"speculators_config.{key}" for key in ("algorithm", "default_proposal_method", "proposal_methods",
          "verifier", "verifier.name_or_path", "verifier.architectures")),
    ],
    "specforge": [
        *LAYER, "architectures", "draft_vocab_size", "num_target_layers", "target_model_name_or_path", "eagle_config",
        "eagle_config.eagle_aux_hidden_state_layer_ids",
    ],
}  # fmt: skip


def change(values: dict[str, Any], path: str, *value: Any) -> None:
    """Sets a nested key, or drops it where no value is given."""
    *sections, key = path.split(".")
    for section in sections:
        values = values[section]
    if value:
        (values[key],) = value
    else:
        del values[key]


@pytest.mark.parametrize("name", NEEDED)
def test_every_key_and_tensor_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    form = QWEN3_FORM if name == "speculators" else LLAMA_FORM
    for vocab in (30, 12):
        config = replace(NATIVE, form=form, draft_vocab=vocab)
        out = convert(save_eagle3(tmp_path / f"source{vocab}", config), tmp_path / f"out{vocab}", name)
        for number, tensor in enumerate(sorted(tensors_of(out))):
            broken = edited(out, tmp_path / f"{vocab}-{number}", lambda _, tensors, one=tensor: tensors.pop(one))  # type: ignore[misc]
            with pytest.raises(InputError, match=f"tensor {tensor} is missing".replace(".", r"\.")):
                read_checkpoint(broken)
    for path in NEEDED[name]:
        broken = edited(out, tmp_path / path, lambda values, _, path=path: change(values, path))  # type: ignore[misc]
        with pytest.raises(InputError, match=path.replace(".", r"\.")):
            read_checkpoint(broken)


@pytest.mark.parametrize(
    ("name", "path", "value", "named"),
    [
        ("speculators", "norm_before_residual", True, "norm_before_residual=True: the residual is the normed feature"),
        ("speculators", "norm_output", True, "norm_output=True: the next feature is the state behind norm"),
        ("speculators", "norm_before_fc", True, "norm_before_fc=True"),
        ("speculators", "target_hidden_size", 32, "target_hidden_size=32 and hidden_size=16"),
        ("speculators", "eagle_aux_hidden_state_layer_ids", [3, 1, 5], r"layer_ids=\[3, 1, 5\], needed ascending"),
        ("speculators", "transformer_layer_config.num_hidden_layers", 2, "num_hidden_layers=2, needed 1"),
        ("speculators", "transformer_layer_config.model_type", "gemma", "model_type='gemma', needed 'qwen3' or"),
        ("speculators", "transformer_layer_config.layer_types", ["sliding_attention"], "layer_types=.'sliding"),
        ("speculators", "speculators_config.algorithm", "peagle", "algorithm='peagle', needed 'eagle3'"),
        ("speculators", "draft_vocab_size", 10, r"has shape \[30, 16\], needed \[10, 16\]"),
        ("specforge", "fc_norm", True, "fc_norm=True: a norm per tap"),
        ("specforge", "model_type", "qwen3", "model_type='qwen3', needed 'llama'"),
        ("specforge", "eagle_config.use_aux_hidden_state", False, "use_aux_hidden_state=False, needed True"),
        ("specforge", "num_target_layers", "6", "num_target_layers='6', needed a number"),
        ("specforge", "attention_bias", True, "attention_bias"),
    ],
)
def test_a_key_that_asks_for_another_computation_is_refused_by_name(
    tmp_path: Path, name: str, path: str, value: Any, named: str
) -> None:
    out = convert(save_eagle3(tmp_path / "source", NATIVE), tmp_path / "out", name)
    with pytest.raises(InputError, match=named):
        read_checkpoint(edited(out, tmp_path / "broken", lambda values, _: change(values, path, value)))


def test_maps_that_leave_tokens_out_of_a_whole_vocabulary_are_refused(tmp_path: Path) -> None:
    out = convert(save_eagle3(tmp_path / "source", NATIVE), tmp_path / "out", "specforge")
    broken = edited(out, tmp_path / "broken", lambda _, tensors: tensors["t2d"].__setitem__(4, False))
    with pytest.raises(InputError, match="d2t and t2d leave tokens out"):
        read_checkpoint(broken)
    bare = edited(out, tmp_path / "bare", lambda _, tensors: [tensors.pop("d2t"), tensors.pop("t2d")])
    assert read_checkpoint(bare).config == NATIVE


def only_what_others_write(values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Leaves what files of other programs hold: no history, no target, the usual of a Llama configuration unsaid."""
    told = (
        "dspark", "ttt_length", "step_loss_decay", "block_size", "target_model_name_or_path", "dtype",
        "num_target_layers", "target_hidden_size", "rope_parameters", "attention_bias", "layer_types",
    )  # fmt: skip
    for key in told:
        values.pop(key, None)
    values["torch_dtype"] = "float32"


def test_the_target_tells_what_files_of_other_programs_do_not(tmp_path: Path) -> None:
    out = convert(save_eagle3(tmp_path / "source", NATIVE), tmp_path / "out", "specforge")
    bare = edited(out, tmp_path / "bare", only_what_others_write)
    with pytest.raises(InputError, match=r"num_target_layers is missing.*name the target; target_model_name_or_path"):
        read_checkpoint(bare)
    found = read_checkpoint(bare, None, 6, "org/other")
    assert found.config == replace(NATIVE, target_name="org/other", ttt_length=7, step_loss_decay=0.8, block=7)
    assert isinstance(found.config, Eagle3Config)
    drafter = new_eagle3_drafter(NATIVE, 7)
    start_from_checkpoint(drafter, bare)
    theirs = tensors_of(tmp_path / "source")
    assert all(torch.equal(value, theirs[name]) for name, value in drafter.state_dict().items())


@pytest.mark.parametrize(("name", "form"), [("speculators", QWEN3_FORM), ("specforge", LLAMA_FORM)])
def test_a_target_stands_in_for_embedding_and_head_but_not_for_a_head_of_its_own(
    tmp_path: Path, name: str, form: Form
) -> None:
    config = replace(NATIVE, form=form, draft_vocab=12)
    source = save_eagle3(tmp_path / "source", config)
    out = convert(source, tmp_path / "out", name)

    def strip(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors.pop("embed_tokens.weight", None)
        del tensors["lm_head.weight"]

    bare = edited(out, tmp_path / "bare", strip)
    with pytest.raises(InputError, match=r"lm_head\.weight is missing"):
        read_checkpoint(bare)
    found = with_vocabulary(read_checkpoint(bare, None, 6, "org/target"), small_vocabulary(config))
    write_checkpoint(tmp_path / "back", found, "deepspec", None, {})
    assert_equal(tensors_of(tmp_path / "back"), tensors_of(source))
    own = edited(out, tmp_path / "own", lambda _, tensors: tensors["lm_head.weight"].mul_(2))
    with pytest.raises(InputError, match=r"lm_head\.weight of the drafter is not the target's.*no place in a drafter"):
        with_vocabulary(read_checkpoint(own), small_vocabulary(config))
