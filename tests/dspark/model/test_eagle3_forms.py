"""EAGLE-3 drafters of every form on disk: they come back as they were, and nothing that decides can be missing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig

from dspark.config import Settings
from dspark.errors import InputError
from dspark.learning import DrafterSettings, Eagle3Settings
from dspark.model.checkpoints import config_of, load_drafter, save_drafter
from dspark.model.config import Eagle3Config, drafter_config
from dspark.model.eagle3 import new_eagle3_drafter
from dspark.model.exchange import check_expressible, read_checkpoint
from dspark.model.families import GEMMA4_FORM, LLAMA_FORM, QWEN3_FORM
from dspark.model.inherit import start_from_checkpoint
from dspark.model.layout import check_servable
from dspark.sections import DataSettings, TargetSettings
from tests.dspark.folders import tensors_of, values_of
from tests.dspark.model.test_layout_forms import GEMMA4_TEXT, SIZES, TARGETS
from tests.dspark.small import small_eagle3, small_vocabulary

CPU = torch.device("cpu")
LLAMA = LlamaConfig(**SIZES)
# Target, `drafter.family`, and the architecture and model type of the file.
FORMS: dict[str, tuple[PreTrainedConfig, Any, str, str]] = {
    "qwen3": (TARGETS["qwen3"], None, "Qwen3Eagle3Model", "qwen3"),
    "of_llama": (LLAMA, None, "Qwen3Eagle3Model", "qwen3"),
    "llama": (LLAMA, "llama", "LlamaEagle3Model", "llama"),
    "gemma4_text": (GEMMA4_TEXT, None, "Gemma4Eagle3Model", "gemma4_text"),
    "gemma4": (TARGETS["gemma4"], None, "Gemma4Eagle3Model", "gemma4_text"),
    "gemma4_unified": (TARGETS["gemma4_unified"], "gemma4", "Gemma4Eagle3Model", "gemma4_text"),
}
# Keys that a file may lack: no drafter depends on them, and of the rotary keys each schema says all.
FREE = {
    "attention_dropout", "bos_token_id", "dspark", "dtype", "eos_token_id", "pad_token_id", "sliding_window",
    "transformers_version", "use_cache",
}  # fmt: skip
FREE_PLAIN = {"max_window_layers", "rope_parameters", "rope_scaling", "rope_theta", "use_sliding_window"}
FREE_GEMMA4 = {
    "moe_intermediate_size", "num_experts", "num_kv_shared_layers", "top_k_experts", "use_bidirectional_attention",
    "use_double_wide_mlp", "vocab_size_per_layer_input",
}  # fmt: skip


def drafter_of(form: str, **changes: Any) -> Eagle3Config:
    """The drafter of a target, drafting three tokens a round from four chained steps."""
    target, family, _, _ = FORMS[form]
    settings = Settings(
        name="small",
        target=TargetSettings(model="org/target"),
        data=DataSettings(conversations=Path("none"), held_out=Path("none")),
        drafter=DrafterSettings(kind="eagle3", block=3, taps=(-1, 3), family=family, **changes),
        eagle3=Eagle3Settings(ttt_length=4, step_loss_decay=0.5),
    )
    config = drafter_config(target.get_text_config(), settings)
    assert isinstance(config, Eagle3Config)
    return config


def saved(folder: Path, form: str, **changes: Any) -> Path:
    """A small drafter with random weights; of a reduced vocabulary it keeps the even ids."""
    config = drafter_of(form, **changes)
    drafter = small_eagle3(config)
    if config.draft_vocab < config.vocab:
        drafter.keep(torch.arange(0, 2 * config.draft_vocab, 2))
    vocabulary, target = small_vocabulary(config), FORMS[form][0]
    save_drafter(folder, drafter.state_dict(), config, vocabulary, target, None, torch.float32, {"run": "x"})
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_a_drafter_of_every_form_comes_back_as_it_was(form: str, tmp_path: Path) -> None:
    config, folder = drafter_of(form, vocab=12), saved(tmp_path / "drafter", form, vocab=12)
    loaded = load_drafter(folder, CPU, torch.float32)
    assert (loaded.config, loaded.extra) == (config, {"dspark": {"run": "x"}})
    drafter, vocabulary = small_eagle3(config), small_vocabulary(config)
    drafter.keep(torch.arange(0, 24, 2))
    found = loaded.drafter.state_dict()
    assert found.keys() == drafter.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in drafter.state_dict().items())
    narrowed = vocabulary.narrowed(drafter.kept)
    ids, hidden = torch.arange(30), torch.randn(2, 32)
    assert torch.equal(loaded.vocabulary.embed(ids), narrowed.embed(ids))
    assert torch.equal(loaded.vocabulary.draft_logits(hidden), narrowed.draft_logits(hidden))


@pytest.mark.parametrize("form", FORMS)
def test_a_file_names_its_form_and_counts_its_own_layer_and_the_target_s(form: str, tmp_path: Path) -> None:
    values = values_of(saved(tmp_path / "drafter", form))
    _, _, architecture, model_type = FORMS[form]
    wanted = {
        "architectures": [architecture], "model_type": model_type, "num_hidden_layers": 1, "num_target_layers": 6,
        "draft_num_hidden_layers": 1, "layer_types": ["full_attention"], "target_layer_ids": [-1, 3],
        "ttt_length": 4, "step_loss_decay": 0.5, "target_model_name_or_path": "org/target", "block_size": 3,
    }  # fmt: skip
    assert {key: values[key] for key in wanted} == wanted
    read = AutoConfig.from_pretrained(tmp_path / "drafter")
    assert (read.model_type, read.num_hidden_layers) == (model_type, 1)


def test_a_gemma4_file_says_what_its_layer_and_its_logits_need(tmp_path: Path) -> None:
    folder = saved(tmp_path / "drafter", "gemma4_unified")
    wanted = {
        "target_model_type": "gemma4_unified", "target_text_model_type": "gemma4_unified_text", "global_head_dim": 16,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 2.0,
        "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip
    assert {key: values_of(folder)[key] for key in wanted} == wanted
    layer = {name.removeprefix("layers.0.") for name in tensors_of(folder) if name.startswith("layers.0.")}
    norms = ["hidden_norm", "input_layernorm", "self_attn.q_norm", "self_attn.k_norm"] + [
        f"{place}_layernorm" for place in ("post_attention", "pre_feedforward", "post_feedforward")
    ]
    projections = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj"] + [
        f"mlp.{part}_proj" for part in ("gate", "up", "down")
    ]
    assert layer == {f"{name}.weight" for name in norms + projections} | {"layer_scalar"}
    assert tensors_of(folder)["layers.0.self_attn.k_proj.weight"].shape == (16, 64)


def test_a_layer_in_llama_form_has_no_norms_of_queries_and_keys_and_no_published_name(tmp_path: Path) -> None:
    folder = saved(tmp_path / "drafter", "llama")
    assert not [name for name in tensors_of(folder) if "q_norm" in name or "k_norm" in name]
    found = read_checkpoint(folder)
    assert found.config.form == LLAMA_FORM
    check_expressible(found, "speculators")
    with pytest.raises(InputError, match="the Llama form, for which engines have no published name"):
        check_expressible(found, "deepspec")
    for form in FORMS.keys() - {"llama"}:
        check_servable(drafter_of(form))
    with pytest.raises(InputError, match="model_type: 'qwen3' contradicts the architecture LlamaEagle3Model"):
        config_of(values_of(folder) | {"model_type": "qwen3"})


@pytest.mark.parametrize("form", ["qwen3", "llama", "gemma4_text"])
def test_every_tensor_that_is_missing_is_named(form: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "drafter", form, vocab=12)
    tensors = tensors_of(folder)
    for name in tensors:
        save_file({other: value for other, value in tensors.items() if other != name}, folder / "model.safetensors")
        with pytest.raises(InputError, match=f"tensor {name} is missing"):
            load_drafter(folder, CPU, torch.float32)


@pytest.mark.parametrize(("form", "free"), [("qwen3", FREE_PLAIN), ("llama", FREE_PLAIN), ("gemma4_text", FREE_GEMMA4)])
def test_every_key_that_is_missing_is_named_or_changes_nothing(form: str, free: set[str], tmp_path: Path) -> None:
    values = values_of(saved(tmp_path / "drafter", form))
    whole, spared = config_of(values), set()
    assert isinstance(whole, Eagle3Config)
    for key in values:
        try:
            found = config_of({other: value for other, value in values.items() if other != key})
        except InputError as error:
            assert key in str(error)
        else:
            assert found == (replace(whole, block=whole.ttt_length) if key == "block_size" else whole)
            spared.add(key)
    assert spared == FREE | free | {"block_size"}
    with pytest.raises(InputError, match="rope"):
        config_of({key: value for key, value in values.items() if not key.startswith("rope_")})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["Gemma3Eagle3Model"]),
        ("model_type", "gemma4_unified_text"),
        ("num_hidden_layers", 6),
        ("draft_num_hidden_layers", 2),
        ("layer_types", ["sliding_attention"]),
        ("target_layer_ids", [5]),
        ("ttt_length", 0),
        ("step_loss_decay", 0),
        ("hidden_activation", "nothing"),
        ("hidden_size_per_layer_input", 256),
        ("enable_moe_block", True),
        ("attention_bias", True),
        ("global_head_dim", "16"),
        ("final_logit_softcapping", 0),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}),
    ],
)
def test_a_value_that_a_gemma4_drafter_does_not_compute_is_refused_with_its_key(
    key: str, value: Any, tmp_path: Path
) -> None:
    values = values_of(saved(tmp_path / "drafter", "gemma4_text"))
    with pytest.raises(InputError, match=key):
        config_of(values | {key: value})


def test_a_published_gemma4_12b_drafter_is_read(tmp_path: Path) -> None:
    """The sizes of the target, one layer that drafts as many tokens as it was trained for."""
    full = {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"}
    values = values_of(saved(tmp_path / "drafter", "gemma4_unified")) | {
        "hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16, "num_key_value_heads": 8,
        "global_head_dim": 512, "head_dim": 256, "vocab_size": 262144, "final_logit_softcapping": 30.0,
        "num_target_layers": 48, "target_layer_ids": [5, 17, 29, 41, 46], "ttt_length": 7, "step_loss_decay": 0.8,
        "target_model_name_or_path": "google/gemma-4-12B-it",
        "rope_parameters": {
            "full_attention": full, "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    }  # fmt: skip
    del values["block_size"], values["dspark"]
    config = config_of(values)
    assert isinstance(config, Eagle3Config)
    assert (config.heads, config.kv_heads, config.head_dim, config.hidden) == (16, 1, 512, 3840)
    assert (config.shared_kv, config.soft_cap, config.rope, config.block) == (True, 30.0, full, 7)
    assert (config.layers, config.target_layers, config.form) == (1, 48, GEMMA4_FORM)


@pytest.mark.parametrize("form", ["llama", "gemma4_text"])
def test_a_drafter_starts_from_one_of_its_form_alone(form: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "source", form)
    drafter = new_eagle3_drafter(drafter_of(form), 7)
    start_from_checkpoint(drafter, source)
    theirs = tensors_of(source)
    assert all(torch.equal(value, theirs[name]) for name, value in drafter.state_dict().items())
    other = drafter_of("of_llama" if form == "llama" else "qwen3")
    assert other.form == QWEN3_FORM
    with pytest.raises(InputError, match=rf"drafter\.family is qwen3, the checkpoint has {form.split('_')[0]}"):
        start_from_checkpoint(new_eagle3_drafter(other, 7), source)
