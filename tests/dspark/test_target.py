"""The target: taps and final states against transformers, alone and in ragged batches."""

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config

from dspark.capture import prove_capture
from dspark.data.render import Sample
from dspark.decoding.engine import Engine, Request
from dspark.decoding.sampling import Sampling
from dspark.errors import InputError
from dspark.learning import DrafterSettings
from dspark.model.config import draft_config
from dspark.model.families import family_of
from dspark.sections import Precision, TargetSettings
from dspark.target import Target, TargetStates, check_one_device, load_target, special_tokens
from dspark.target_files import fingerprint, load_config, load_vocabulary, load_whole_config
from tests.tiny import MASK_ID, tiny_target_folder

CPU = torch.device("cpu")
TAPS = (-1, 0, 2, 4)


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma4_text", "gemma4", "gemma4_unified"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target_folder(tmp_path_factory.mktemp(request.param) / "target", request.param)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(TargetSettings(model=str(folder), dtype="fp32"), CPU)


@pytest.fixture(scope="module")
def twin(folder: Path) -> Any:
    """The same model, loaded by transformers alone."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(seed))


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to 1e-5 of the largest magnitude."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_tap_k_is_the_output_of_layer_k_and_minus_one_is_the_embedding(target: Target, twin: Any) -> None:
    ids = tokens(2, 9)
    with torch.no_grad():
        hidden = twin(ids, output_hidden_states=True).hidden_states
    expected = torch.cat([hidden[tap + 1] for tap in TAPS], dim=-1)
    assert_near(target.states(ids, TAPS).taps, expected)


def test_final_gives_the_logits_of_the_model(target: Target, twin: Any) -> None:
    ids = tokens(2, 9)
    with torch.no_grad():
        expected = twin(ids).logits
    assert_near(target.vocabulary.logits(target.states(ids, ()).final), expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_proof_of_a_capture_holds_beyond_a_sliding_window(folder: Path, dtype: Precision) -> None:
    sample = Sample("a", "a", None, tokens(1, 40)[0].numpy().astype(np.int32), np.ones(40, dtype=np.uint8))
    prove_capture(load_target(TargetSettings(model=str(folder), dtype=dtype), CPU), sample, TAPS)


class Shifted(Target):
    """A target whose taps are one layer late."""

    def _tap_source(self, tap: int) -> nn.Module:
        return super()._tap_source(tap + 1)


class Unnormed(Target):
    """A target whose `final` is the last layer's raw output."""

    def states(self, input_ids_BQ: torch.Tensor, taps: Sequence[int], *rest: Any, **more: Any) -> TargetStates:
        raw = super().states(input_ids_BQ, (*taps, self.layers - 1), *rest, **more).taps
        return TargetStates(raw[..., : -self.hidden], raw[..., -self.hidden :])


@pytest.mark.parametrize("wrong", [Shifted, Unnormed])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_proof_of_a_capture_finds_wrong_states_beside_one_huge_activation(
    folder: Path, dtype: Precision, wrong: type[Target]
) -> None:
    ids = tokens(1, 40)[0].numpy().astype(np.int32)
    right = load_target(TargetSettings(model=str(folder), dtype=dtype), CPU)
    right.vocabulary.embedding_VH[int(ids[0]), 0] = 2000.0
    sample = Sample("a", "a", None, ids, np.ones(40, dtype=np.uint8))
    prove_capture(right, sample, TAPS)
    with pytest.raises(AssertionError, match=r"tap -1 is not|final is not"):
        prove_capture(wrong(right.model, right.tokenizer, "t", "r", "f"), sample, TAPS)


def test_taps_come_in_the_order_asked_for_and_none_is_empty(target: Target) -> None:
    ids = tokens(1, 5)
    states = target.states(ids, (4, 0))
    first, second = target.states(ids, (4,)).taps, target.states(ids, (0,)).taps
    assert torch.equal(states.taps, torch.cat((first, second), dim=-1))
    assert target.states(ids, ()).taps.shape == (1, 5, 0)


def test_no_hook_outlives_its_call(target: Target) -> None:
    target.states(tokens(1, 3), TAPS)
    with pytest.raises(IndexError):
        target.states(torch.tensor([[10_000]]), TAPS)
    assert not any(module._forward_hooks for module in target.model.modules())


def test_a_ragged_padded_batch_gives_the_states_of_each_row_alone(target: Target) -> None:
    lengths = (3, 11, 7, 1)
    ids = tokens(len(lengths), max(lengths))
    for row, length in enumerate(lengths):
        ids[row, length:] = 0
    together = target.states(ids, TAPS)
    again = target.states(ids, TAPS)
    assert torch.equal(together.taps, again.taps)
    for row, length in enumerate(lengths):
        alone = target.states(ids[row : row + 1, :length], TAPS)
        assert_near(together.taps[row, :length], alone.taps[0])
        assert_near(together.final[row, :length], alone.final[0])


def test_a_text_in_pieces_with_a_cache_gives_the_states_of_the_whole(target: Target) -> None:
    ids = tokens(1, 10)
    whole = target.states(ids, TAPS)
    cache = DynamicCache(config=target.config)
    visible = torch.ones(10, 10, dtype=torch.bool).tril()[None, None]
    parts = []
    for start, end in ((0, 4), (4, 10)):
        positions = torch.arange(start, end)[None]
        parts.append(target.states(ids[:, start:end], TAPS, positions, visible[:, :, start:end, :end], cache))
    assert_near(torch.cat([p.taps for p in parts], dim=1), whole.taps)
    assert_near(torch.cat([p.final for p in parts], dim=1), whole.final)


def test_a_target_is_frozen_and_in_evaluation_mode(target: Target) -> None:
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert not target.states(tokens(1, 4), TAPS).final.requires_grad


def test_sizes_and_stop_ids_are_read_from_the_model(target: Target) -> None:
    assert (target.hidden, target.layers, target.vocab_size) == (48, 6, 320)
    assert (target.dtype, target.device) == (torch.float32, CPU)
    assert target.stop_ids == {258}


def test_the_last_layer_is_refused_as_a_tap(target: Target) -> None:
    def settings(*taps: int) -> DrafterSettings:
        return DrafterSettings(taps=taps, mask_token_id=MASK_ID)

    assert draft_config(target.config, settings(-1, target.layers - 2)).taps == (-1, 4)
    for taps in ((1, target.layers - 1), (1, target.layers)):
        with pytest.raises(InputError, match=r"drafter\.taps"):
            draft_config(target.config, settings(*taps))


def test_the_fingerprint_follows_the_weights_and_not_the_folder(folder: Path, target: Target, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    assert fingerprint(copy) == target.fingerprint
    weights = load_file(copy / "model.safetensors")
    weights[f"{target.family.decoder}.layers.3.mlp.up_proj.weight"][0, 7] += 0.5
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(copy) != target.fingerprint


def test_the_fingerprint_does_not_depend_on_the_compute_type(folder: Path, target: Target) -> None:
    low = load_target(TargetSettings(model=str(folder), dtype="bf16"), CPU)
    assert low.dtype == torch.bfloat16
    assert low.fingerprint == target.fingerprint


def test_the_vocabulary_alone_is_that_of_the_whole_target(folder: Path, target: Target) -> None:
    alone = load_vocabulary(TargetSettings(model=str(folder)), CPU, torch.float32)
    assert torch.equal(alone.embedding_VH, target.vocabulary.embedding_VH)
    assert torch.equal(alone.head_VH, target.vocabulary.head_VH)
    assert (alone.embedding_VH is alone.head_VH) == target.config.tie_word_embeddings


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(InputError, match=r"target\.model='\./nowhere'"):
        load_target(TargetSettings(model="./nowhere"), CPU)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"could not be loaded.*needed"):
        load_target(TargetSettings(model=str(tmp_path)), CPU)


def test_an_unsupported_family_is_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"'gpt2' is not supported \(supported: .*llama, mistral"):
        load_config(TargetSettings(model=str(tmp_path)))


def test_special_tokens_are_all_that_the_tokenizer_marks_so_and_what_ends_a_text(target: Target) -> None:
    config = copy.copy(target.config)
    config.eos_token_id = [258, 7, 100_000]
    assert special_tokens(config, target.tokenizer) == {7, 256, 257, 258, 259}


def halves(folder: Path, here: int | str, kept: int | str) -> dict[str, int | str]:
    """A device map that keeps embedding, head and every other layer in `kept`."""
    decoder = family_of(load_whole_config(TargetSettings(model=str(folder), dtype="fp32"))).decoder
    layers = {f"{decoder}.layers.{layer}": (here, kept)[layer % 2] for layer in range(6)}
    return {
        f"{decoder}.embed_tokens": kept,
        "lm_head": kept,
        f"{decoder}.norm": here,
        f"{decoder}.rotary_emb": here,
    } | layers


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_target_whose_layers_wait_on_disk_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path / name, name)
    whole = load_target(TargetSettings(model=str(folder), dtype="fp32"), CPU)
    dealt = load_target(TargetSettings(model=str(folder), dtype="fp32", device_map=halves(folder, "cpu", "disk")))
    assert any(weight.is_meta for weight in dealt.model.parameters()) and dealt.computed_on == {"cpu"}
    ids = tokens(2, 9)
    found, expected = dealt.states(ids, TAPS), whole.states(ids, TAPS)
    assert torch.equal(found.taps, expected.taps) and torch.equal(found.final, expected.final)
    assert torch.equal(dealt.vocabulary.logits(found.final), whole.vocabulary.logits(expected.final))
    sample = Sample("a", "a", None, ids[0].numpy().astype(np.int32), np.ones(9, dtype=np.uint8))
    prove_capture(dealt, sample, TAPS)
    request = Request("a", tuple(ids[0].tolist()), 6, Sampling())
    texts = [Engine(target, None, 1, 32).generate([request])[0].tokens for target in (whole, dealt)]
    assert texts[0] == texts[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_target_that_is_dealt_to_gpus_and_memory_gives_the_states_of_one_device(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path / "target", "qwen3")
    whole = load_target(TargetSettings(model=str(folder), dtype="fp32"), torch.device("cuda", 0))
    ids = tokens(2, 9).to("cuda:0")
    expected = whole.states(ids, TAPS)
    others: list[int | str] = ["cpu", *range(1, min(2, torch.cuda.device_count()))]
    for other in others:
        dealt = load_target(TargetSettings(model=str(folder), dtype="fp32", device_map=halves(folder, 0, other)))
        found = dealt.states(ids, TAPS)
        assert_near(found.taps.cpu(), expected.taps.cpu())
        assert_near(dealt.vocabulary.logits(found.final).cpu(), whole.vocabulary.logits(expected.final).cpu())
        assert len(dealt.computed_on) == (1 if other == "cpu" else 2)


def test_a_device_map_that_cannot_be_met_is_refused(tmp_path: Path) -> None:
    folder = str(tiny_target_folder(tmp_path / "target"))
    with pytest.raises(InputError, match=r"says nothing of model\.embed_tokens\.weight"):
        load_target(TargetSettings(model=folder, dtype="fp32", device_map={"model.layers.0": "cpu"}))
    spread = TargetSettings(model=folder, device_map={"model": 0, "lm_head": 1})
    for settings, gpus in (
        (spread, 2.0),
        (TargetSettings(model=folder, device_map="auto"), 2.0),
        (TargetSettings(model=folder, device_map={"": 0}), 0.0),
    ):
        with pytest.raises(InputError, match=rf"evaluate\.gpus={gpus:g} does not put the target on one GPU"):
            check_one_device(settings, gpus, "evaluate.gpus")
    check_one_device(TargetSettings(model=folder, device_map="auto"), 1.0, "evaluate.gpus")
    whole = load_target(TargetSettings(model=folder, dtype="fp32"), CPU)
    whole.model.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(InputError, match="layers are computed on 0, 1"):
        Engine(whole, None, 1, 32)
