"""Stored forms of states: planes lose nothing; 8 bits lose little, keep the largest values, and know what they lost."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.data.codecs import Codec, pack, relative_errors, unpack
from dspark.errors import InputError

H = 128  # two values of a token are kept exactly


def buffer(states: Tensor) -> pa.Buffer:
    return pa.py_buffer(states.contiguous().view(torch.uint8).numpy().tobytes())


def restored(form: str, stored: pa.Buffer, tokens: int) -> Tensor:
    out = np.zeros(tokens * H * 2, np.uint8)
    unpack(form, np.frombuffer(stored, np.uint8), out, H)  # type: ignore[arg-type]
    return torch.from_numpy(out).view(torch.bfloat16).view(tokens, H)


@given(st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_planes_give_back_every_bit_pattern(tokens: int, seed: int) -> None:
    value = pa.py_buffer(np.random.default_rng(seed).bytes(tokens * H * 2))
    out = np.zeros(value.size, np.uint8)
    unpack("planes", np.frombuffer(pack("planes", value, H), np.uint8), out, H)
    assert out.tobytes() == value.to_pybytes()


def test_planes_of_values_of_like_size_take_less() -> None:
    states = torch.randn(50, H, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert pack("planes", buffer(states), H).size < 0.8 * 50 * H * 2


def test_the_largest_values_of_a_token_are_kept_exactly_and_the_rest_in_steps_of_their_own_largest() -> None:
    states = torch.zeros(2, H)
    states[0, :4] = torch.tensor([1000.5, -300.0, 127.0, 42.4])
    states[1, 9] = -0.5
    found = restored("int8_outlier", pack("int8_outlier", buffer(states.bfloat16()), H), 2)
    # The third largest is 127: the rest of the token lies on whole numbers.
    assert found[0, :5].tolist() == [1000.0, -300.0, 127.0, 42.0, 0.0]
    assert found[1].tolist() == states[1].tolist()


@given(st.integers(1, 5), st.integers(0, 2**16))
def test_no_value_is_further_off_than_half_a_step_and_rounding(tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    states = (
        torch.randn(tokens, H, generator=generator) * torch.randn(tokens, 1, generator=generator).exp()
    ).bfloat16()
    value = buffer(states)
    stored = pack("int8_outlier", value, H)
    assert stored.size == tokens * (4 + 2 * 4 + H)
    found, exact = restored("int8_outlier", stored, tokens).float(), states.float()
    step = exact.abs().sort(dim=1).values[:, -3:-2] / 127
    assert bool(((found - exact).abs() <= 0.5 * step + found.abs() / 256).all())
    errors = (found - exact).norm(dim=1) / exact.norm(dim=1)
    np.testing.assert_allclose(relative_errors(value, stored, H), errors.numpy(), rtol=1e-5)


def test_states_that_are_not_finite_are_refused_in_8_bits_and_stored_otherwise() -> None:
    states = torch.zeros(1, H, dtype=torch.bfloat16)
    states[0, 3] = float("nan")
    with pytest.raises(InputError, match="cannot store states that are not finite"):
        pack("int8_outlier", buffer(states), H)
    assert pack("bf16", buffer(states), H).equals(buffer(states))


def test_bytes_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="10 bytes, but 1 tokens of 128 values take 140"):
        unpack("int8_outlier", np.zeros(10, np.uint8), np.zeros(2 * H, np.uint8), H)


def test_final_states_are_never_lossy() -> None:
    codec = Codec("planes", "int8_outlier")
    assert (codec.form("tap_1"), codec.form("final"), codec.in_origin) == ("int8_outlier", "planes", "int8_outlier")
    assert (Codec("planes").form("tap_1"), Codec("planes").in_origin) == ("planes", "plain")
