"""The drafter's configuration: what it takes from a target, and which settings a target refuses."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma4TextConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

from dspark.config import Settings
from dspark.errors import InputError
from dspark.learning import DrafterSettings, Eagle3Settings
from dspark.model.config import DSparkConfig, Eagle3Config, check_mask_token, draft_config, drafter_config
from dspark.model.families import GEMMA4_FORM, LLAMA_FORM, QWEN3_FORM
from dspark.sections import DataSettings, TargetSettings


def target(**changes: Any) -> Qwen3Config:
    sizes = {
        "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 777,
        "rms_norm_eps": 1e-5, "initializer_range": 0.03, "pad_token_id": 1, "eos_token_id": [2, 3],
        "rope_parameters": {"rope_type": "default", "rope_theta": 12345.0},
    }  # fmt: skip
    return Qwen3Config(**{**sizes, **changes})


def settings(**changes: Any) -> DrafterSettings:
    return DrafterSettings(**{"taps": (-1, 2, 4), "mask_token_id": 99, "layers": 2, "block": 7, **changes})


def test_sizes_come_from_the_target_and_choices_from_the_settings() -> None:
    found = draft_config(target(), settings(markov_rank=8, markov_head="rnn", confidence_with_markov=False))
    assert found == DSparkConfig(
        hidden=32,
        intermediate=48,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab=100,
        draft_vocab=100,
        norm_eps=1e-5,
        max_positions=777,
        rope={"rope_type": "default", "rope_theta": 12345.0},
        target_layers=6,
        layers=2,
        block=7,
        taps=(-1, 2, 4),
        mask_token_id=99,
        markov_rank=8,
        markov_head="rnn",
        confidence=True,
        confidence_with_markov=False,
        activation="silu",
        init_std=0.03,
    )


def test_a_llama_without_head_dim_or_key_heads_divides_its_width() -> None:
    llama = LlamaConfig(vocab_size=100, hidden_size=32, num_attention_heads=4, num_hidden_layers=6)
    found = draft_config(llama, settings())
    assert (found.head_dim, found.kv_heads) == (8, 4)
    assert found.rope == {"rope_type": "default", "rope_theta": 10000.0}


def test_without_confidence_head_nothing_reads_the_markov_embedding() -> None:
    assert not draft_config(target(), settings(confidence=False)).confidence_with_markov


def test_the_last_layer_is_no_tap() -> None:
    with pytest.raises(InputError, match=r"holds 5, the target's last layer.*-1 to 4"):
        draft_config(target(), settings(taps=(1, 5)))


def test_a_tap_behind_the_last_layer_is_refused() -> None:
    with pytest.raises(InputError, match=r"holds \[6, 9\], but the target has layers 0 to 5"):
        draft_config(target(), settings(taps=(1, 6, 9)))


@pytest.mark.parametrize(
    ("token", "reason"), [(100, "outside the vocabulary 0..99"), (1, "pad token"), (2, "eos token"), (3, "eos token")]
)
def test_a_mask_token_must_exist_and_mean_nothing_else(token: int, reason: str) -> None:
    with pytest.raises(InputError, match=f"mask_token_id={token} is .*{reason}"):
        draft_config(target(), settings(mask_token_id=token))


def test_a_single_end_token_and_missing_ids_are_understood() -> None:
    plain: PreTrainedConfig = target(eos_token_id=7, pad_token_id=None)
    check_mask_token(99, plain)
    with pytest.raises(InputError, match="eos token"):
        check_mask_token(7, plain)


def eagle3_settings(**drafter: Any) -> Settings:
    return Settings(
        name="small",
        target=TargetSettings(model="org/target"),
        data=DataSettings(conversations=Path("none"), held_out=Path("none")),
        drafter=DrafterSettings(kind="eagle3", taps=(-1, 2, 4), block=5, **drafter),
        eagle3=Eagle3Settings(ttt_length=3),
    )


@pytest.mark.parametrize("family", [None, "qwen3"])
@pytest.mark.parametrize("of", [target(), LlamaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=6)])
def test_an_eagle3_layer_has_the_sizes_of_its_target_and_the_qwen3_form(of: PreTrainedConfig, family: Any) -> None:
    found = drafter_config(of, eagle3_settings(family=family, vocab=50))
    assert isinstance(found, Eagle3Config)
    assert (found.form, found.layers, found.hidden, found.draft_vocab) == (QWEN3_FORM, 1, 32, 50)
    assert (found.taps, found.block, found.target_name) == ((-1, 2, 4), 5, "org/target")
    assert (found.ttt_length, found.step_loss_decay) == (3, 0.8)


def test_an_eagle3_layer_has_the_form_of_its_family_or_the_one_that_is_named() -> None:
    llama = LlamaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=6)
    assert drafter_config(llama, eagle3_settings(family="llama")).form == LLAMA_FORM
    sizes: dict[str, Any] = {
        "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "global_head_dim": 16,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 5.0,
    }  # fmt: skip
    gemma4 = Gemma4TextConfig(**sizes, hidden_size_per_layer_input=0)
    for family in (None, "gemma4"):
        found = drafter_config(gemma4, eagle3_settings(family=family))
        assert (found.form, found.kv_heads, found.head_dim, found.shared_kv) == (GEMMA4_FORM, 1, 16, True)
        assert (found.soft_cap, found.embedding_scale, found.layers) == (5.0, 32**0.5, 1)
    with pytest.raises(InputError, match=r"drafter\.family=gemma4 does not fit a target of the family qwen3"):
        drafter_config(target(), eagle3_settings(family="gemma4"))
