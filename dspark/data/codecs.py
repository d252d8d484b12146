"""How a sample's states lie on disk: as they are, as byte planes, or (taps only) in 8 bits with outliers kept.

    bf16          S*H*2 bytes, little-endian: the contract's own value
    planes        the high bytes, compressed, then the low bytes: lossless. Sign and exponent of neighbours are alike;
                  the low bytes are noise that no compressor shortens
    int8_outlier  for each token a scale, its largest values exactly, the rest in 8 bits: 17/32 of bf16 + 4 bytes, lossy

Shape suffixes: S tokens, H hidden width, K values of a token that are kept exactly.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.data.origin import final_column
from dspark.errors import InputError

Form = Literal["bf16", "planes", "int8_outlier"]
# A few channels of real states are a hundred times the others: they would take the whole range of 8 bits.
_OUTLIER_SHARE = 64
# Stored bytes over those of bf16, for planning: planes depend on the states, int8_outlier a little on their width.
SHARE: dict[Form, float] = {"bf16": 1.0, "planes": 0.72, "int8_outlier": 0.54}


@dataclass(frozen=True)
class Codec:
    """`storage` loses nothing. `taps` may: `int8_outlier` is part of the Origin, so that no run reads it unasked."""

    storage: Literal["plain", "planes"] = "plain"
    taps: Literal["bf16", "int8_outlier"] = "bf16"

    @property
    def in_origin(self) -> str:
        """`Origin.codec` of what the reader returns: what happened to the values, not how they are stored."""
        return "plain" if self.taps == "bf16" else self.taps

    def form(self, column: str) -> Form:
        """How a column of states is stored; `final` never loses anything, for it gives the target's logits."""
        if self.taps != "bf16" and column != final_column():
            return self.taps
        return "planes" if self.storage == "planes" else "bf16"


def pack(form: Form, value: pa.Buffer, hidden: int) -> pa.Buffer:
    """The stored bytes of one sample's states.

    Raises:
        InputError: `int8_outlier` and a value that is not finite.
    """
    if form == "planes":
        return _planes(np.frombuffer(value, np.uint16))
    if form == "int8_outlier":
        return _int8(torch.frombuffer(memoryview(value), dtype=torch.bfloat16).view(-1, hidden))
    return value


def unpack(form: Form, stored: NDArray[np.uint8], out: NDArray[np.uint8], hidden: int) -> None:
    """Writes the bf16 values of stored bytes to `out`, which has their size.

    Raises:
        ValueError: the bytes are not of this form.
    """
    if form == "planes":
        _from_planes(stored, out.view(np.uint16))
    elif form == "int8_outlier":
        states = _from_int8(stored, len(out) // (2 * hidden), hidden)
        out[:] = states.view(torch.uint8).reshape(-1).numpy()
    else:
        out[:] = stored


def relative_errors(value: pa.Buffer, stored: pa.Buffer, hidden: int) -> NDArray[np.float64]:
    """How far `int8_outlier` moved each token's state, relative to that state's norm. [S]"""
    exact_SH = torch.frombuffer(memoryview(value), dtype=torch.bfloat16).view(-1, hidden).float()
    found_SH = _from_int8(np.frombuffer(stored, np.uint8), len(exact_SH), hidden).float()
    errors_S = (found_SH - exact_SH).norm(dim=-1) / exact_SH.norm(dim=-1).clamp(min=1e-30)
    result: NDArray[np.float64] = errors_S.double().numpy()
    return result


def _planes(values: NDArray[np.uint16]) -> pa.Buffer:
    high = pa.Codec("zstd", compression_level=1).compress((values >> 8).astype(np.uint8))
    return pa.py_buffer(len(high).to_bytes(4, "little") + high.to_pybytes() + values.astype(np.uint8).tobytes())


def _from_planes(stored: NDArray[np.uint8], out: NDArray[np.uint16]) -> None:
    size = int.from_bytes(stored[:4].tobytes(), "little")
    packed, low = stored[4 : 4 + size], stored[4 + size :]
    high = pa.Codec("zstd").decompress(packed, decompressed_size=len(out))
    out[:] = np.frombuffer(high, np.uint8)
    out <<= 8
    out |= low


def _kept(hidden: int) -> int:
    """K: how many values of a token are stored exactly."""
    return max(1, hidden // _OUTLIER_SHARE)


def _int8(states_SH: Tensor) -> pa.Buffer:
    exact_SH = states_SH.float()
    if not bool(torch.isfinite(exact_SH).all()):
        raise InputError("int8_outlier cannot store states that are not finite: leave these samples out, or use bf16")
    hidden = exact_SH.shape[1]
    assert hidden < 2**16, "places of outliers are stored in 16 bits"
    places_SK = exact_SH.abs().topk(_kept(hidden), dim=1).indices
    rest_SH = exact_SH.scatter(1, places_SK, 0.0)
    scale_S = (rest_SH.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    parts: list[NDArray[Any]] = [
        scale_S.numpy(),
        places_SK.numpy().astype("<u2"),
        states_SH.gather(1, places_SK).view(torch.int16).numpy(),
        (rest_SH / scale_S[:, None]).round().to(torch.int8).numpy(),
    ]
    return pa.py_buffer(b"".join(part.tobytes() for part in parts))


def _from_int8(stored: NDArray[np.uint8], tokens: int, hidden: int) -> Tensor:
    """The restored states [S, H], bf16."""
    kept = _kept(hidden)
    sizes = [4 * tokens, 2 * tokens * kept, 2 * tokens * kept, tokens * hidden]
    if sum(sizes) != len(stored):
        raise ValueError(f"{len(stored)} bytes, but {tokens} tokens of {hidden} values take {sum(sizes)}")
    scale, places, exact, small = np.split(stored, np.cumsum(sizes)[:-1])
    scale_S = torch.from_numpy(np.frombuffer(scale.tobytes(), "<f4").copy())
    small_SH = torch.from_numpy(small.view(np.int8).reshape(tokens, hidden).astype(np.float32))
    places_SK = torch.from_numpy(np.frombuffer(places.tobytes(), "<u2").astype(np.int64).reshape(tokens, kept))
    exact_SK = torch.frombuffer(bytearray(exact.tobytes()), dtype=torch.bfloat16).view(tokens, kept)
    return (small_SH * scale_S[:, None]).bfloat16().scatter(1, places_SK, exact_SK)
