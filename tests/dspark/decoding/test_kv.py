"""The store against literals, and ragged passes over it against the target without a cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma4UnifiedTextConfig, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from dspark.decoding.kv import Aim, AimedCache, Store, target_store
from dspark.model.attention import KeyValues
from dspark.sections import TargetSettings
from dspark.target import Target, load_target
from tests.tiny import gemma4_sizes, tiny_target_folder, tiny_tokenizer

CPU = torch.device("cpu")


def small_store(width: int = 64) -> Store:
    store = Store([(1, 2), (1, 2)], rows=3, device=CPU, dtype=torch.float32)
    store.reserve(width)
    return store


def numbered(*shape: int) -> KeyValues:
    values = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    return KeyValues(values, -values)


def test_a_store_widens_in_steps_and_only_when_it_must() -> None:
    store = small_store(65)
    assert store.width == 128
    before = [layer.keys.data_ptr() for layer in store.layers]
    store.reserve(100)
    assert [layer.keys.data_ptr() for layer in store.layers] == before
    store.reserve(129)
    assert [layer.values.shape for layer in store.layers] == [(3, 1, 192, 2)] * 2


def test_each_row_is_written_at_its_own_positions_and_nowhere_else() -> None:
    store = small_store()
    store.write(1, store.places(torch.tensor([[0], [2]]), torch.tensor([[5, 6], [0, 1]])), numbered(2, 1, 2, 2))
    keys, values = store.layers[1]
    assert keys[0, 0, 5:7].tolist() == [[1, 2], [3, 4]]
    assert keys[2, 0, 0:2].tolist() == [[5, 6], [7, 8]]
    assert values[2, 0, 1].tolist() == [-7, -8]
    assert keys.count_nonzero() == 8 and store.layers[0].keys.count_nonzero() == 0


def test_what_a_forward_reads_is_the_store_itself() -> None:
    store = small_store()
    aim = Aim(1, torch.tensor([[3, 4]]), 5)
    keys, values = AimedCache(store, aim).update(*numbered(1, 1, 2, 2), layer_idx=0)
    assert keys.shape == (1, 1, 5, 2)
    assert keys.untyped_storage().data_ptr() == store.layers[0].keys.untyped_storage().data_ptr()
    assert values[0, 0, 3:].tolist() == [[-1, -2], [-3, -4]]


def test_a_query_sees_its_row_up_to_its_own_position() -> None:
    visible = Aim(0, torch.tensor([[1, 2], [3, 4]]), 5).visible()
    assert visible.shape == (2, 1, 2, 5)
    assert visible[:, 0].int().tolist() == [
        [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]],
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    ]


def test_a_row_moves_with_its_length_only() -> None:
    store = small_store()
    store.write(0, store.places(torch.tensor([[2]]), torch.arange(4)), numbered(1, 1, 4, 2))
    store.move(2, 0, length=3)
    assert store.layers[0].keys[0, 0, :4].tolist() == [[1, 2], [3, 4], [5, 6], [0, 0]]


def prefill(target: Target, store: Store, first: int, ids: Tensor) -> None:
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    target.states(ids, (), positions, cache=AimedCache(store, Aim(first, positions, ids.shape[1])))


def ragged(target: Target, store: Store, ids: Tensor, starts: list[int]) -> Tensor:
    positions = torch.tensor(starts)[:, None] + torch.arange(ids.shape[1])
    aim = Aim(0, positions, int(positions.max()) + 1)
    states = target.states(ids, (1,), positions, aim.visible(), AimedCache(store, aim))
    return torch.cat(states, dim=-1)


def alone(target: Target, ids: list[int], last: int) -> Tensor:
    return torch.cat(target.states(torch.tensor([ids]), (1,)), dim=-1)[0, -last:]


@pytest.fixture(params=["llama", "qwen3", "gemma4_text", "gemma4_unified"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    return load_target(TargetSettings(model=str(tiny_target_folder(tmp_path, request.param)), dtype="fp32"))


def test_ragged_passes_equal_the_target_without_a_cache_after_rejections_too(target: Target) -> None:
    store = target_store(target.config, 2, CPU, torch.float32)
    store.reserve(40)
    long, short = list(range(20, 39)), list(range(70, 75))
    prefill(target, store, 0, torch.tensor([long]))
    prefill(target, store, 1, torch.tensor([short]))

    found = ragged(target, store, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), [19, 5])
    torch.testing.assert_close(found[0], alone(target, [*long, 1, 2, 3, 4], 4), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1], alone(target, [*short, 5, 6, 7, 8], 4), atol=1e-4, rtol=1e-4)

    # Row 0 rejects all but its first token, row 1 all but three: their lengths are 20 and 8 now.
    found = ragged(target, store, torch.tensor([[90, 91], [92, 93]]), [20, 8])
    torch.testing.assert_close(found[0], alone(target, [*long, 1, 90, 91], 2), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1], alone(target, [*short, 5, 6, 7, 92, 93], 2), atol=1e-4, rtol=1e-4)

    store.move(1, 0, length=10)
    found = ragged(target, store, torch.tensor([[94]]), [10])
    torch.testing.assert_close(found[0], alone(target, [*short, 5, 6, 7, 92, 93, 94], 1), atol=1e-4, rtol=1e-4)


def test_prompts_of_unequal_length_are_prefilled_together(target: Target) -> None:
    store = target_store(target.config, 3, CPU, torch.float32)
    store.reserve(30)
    prefill(target, store, 1, torch.tensor([[30, 31, 32, 33], [40, 41, 0, 0]]))
    store.move(2, 0, length=2)
    found = ragged(target, store, torch.tensor([[42, 43], [34, 35]]), [2, 4])
    torch.testing.assert_close(found[0], alone(target, [40, 41, 42, 43], 2), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1], alone(target, [30, 31, 32, 33, 34, 35], 2), atol=1e-4, rtol=1e-4)


SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "initializer_range": 0.3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 258,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
MISTRAL = MistralConfig(**SIZES, sliding_window=16)
QWEN2 = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=1)


@pytest.mark.parametrize("kind", [MistralForCausalLM, Qwen2ForCausalLM])
def test_a_windowed_target_is_exact_beyond_its_window(kind: Any) -> None:
    config = MISTRAL if kind is MistralForCausalLM else QWEN2
    torch.manual_seed(0)
    target = Target(kind._from_config(config, attn_implementation="sdpa"), tiny_tokenizer(), "tiny", "local", "none")
    store = target_store(target.config, 2, CPU, torch.float32)
    store.reserve(40)
    for row, length in enumerate((20, 9)):
        prefill(target, store, row, torch.tensor([list(range(1, length + 1))]))
    found = ragged(target, store, torch.tensor([[50, 51, 52, 53, 54, 55], [60, 61, 62, 63, 64, 65]]), [20, 9])
    for row, (length, first) in enumerate(((20, 50), (9, 60))):
        wanted = alone(target, [*range(1, length + 1), *range(first, first + 6)], 6)
        torch.testing.assert_close(found[row], wanted, atol=1e-4, rtol=1e-4)


def test_what_lies_before_the_window_changes_no_later_state() -> None:
    torch.manual_seed(0)
    model = MistralForCausalLM._from_config(MISTRAL, attn_implementation="sdpa")
    target = Target(model, tiny_tokenizer(), "tiny", "local", "none")
    texts = torch.tensor([[first, *range(2, 60)] for first in (1, 99)])
    positions = torch.arange(59).expand(2, -1)
    visible = torch.ones(59, 59, dtype=torch.bool).tril()[None, None]
    one, other = target.states(texts, (), positions, visible).final
    # Three layers of 16 tokens reach back over 45: the first token is known to positions 1 to 45 and to none behind.
    assert (one[1:46] - other[1:46]).abs().amax(dim=-1).min() > 0
    assert torch.equal(one[46:], other[46:])


def test_layers_that_reuse_keys_and_values_keep_none() -> None:
    sizes = gemma4_sizes({**SIZES, "num_hidden_layers": 6}) | {"attention_k_eq_v": False, "num_kv_shared_layers": 2}
    config = Gemma4UnifiedTextConfig(**sizes)
    shapes = [tuple(layer.keys.shape) for layer in target_store(config, 3, CPU, torch.float32).layers]
    assert shapes == [(3, 2, 0, 8), (3, 2, 0, 16)] * 2 + [(3, 0, 0, 8), (3, 0, 0, 16)]
