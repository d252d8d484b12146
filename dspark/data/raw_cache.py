"""Caches in the raw layout of the published training code, read for conversion.

manifest.json   version 2, number of samples, taps, hidden width, types, shard files
samples.idx     56 bytes per sample: number, shard, tokens, and where its five tensors begin in the shard
shard-*.bin     per sample: ids int32 [S], attention mask uint8 [S], loss mask uint8 [S], taps bf16 [S, L*H] (those of
                a token side by side, in the manifest's order), normed last states bf16 [S, H]

It names no weights and no template: the Origin's fields for both come from whoever converts it.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from dspark.data.captures import encode
from dspark.data.origin import Origin
from dspark.data.render import Sample, sample_id
from dspark.errors import InputError

MANIFEST, INDEX = "manifest.json", "samples.idx"
_RECORD = np.dtype(
    [("sample", "<u8"), ("shard", "<u4"), ("tokens", "<u4")]
    + [(name, "<u8") for name in ("ids", "attention", "loss", "taps", "final")]
)
# What the manifest must say for the bytes to mean what is read into them here.
_NEEDED: dict[str, Any] = {
    "version": 2,
    "hidden_dtype": "bfloat16",
    "token_dtype": "int32",
    "mask_dtype": "uint8",
    "index_record_size": _RECORD.itemsize,
}


class RawCache:
    """A raw cache in a local folder. Reads plainly, sample by sample.

    Raises:
        InputError: a file is missing, damaged, or of another version or type; says which.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._manifest = self._read_manifest()
        self.taps = tuple(int(tap) for tap in self._manifest["target_layer_ids"])
        self.hidden = int(self._manifest["hidden_size"])
        self.target = str(self._manifest.get("target_model_name_or_path", "unknown"))
        self._files = {int(shard["shard_id"]): str(shard["file_name"]) for shard in self._manifest["shards"]}
        self._index = self._read_index()
        self.lengths: NDArray[np.int64] = self._index["tokens"].astype(np.int64)
        self._check_extents()
        self._open: tuple[int, int] | None = None

    @property
    def render(self) -> str:
        """What the manifest says of how its rows were made, as one value: no other renderer's rows have it."""
        told = {key: self._manifest.get(key) for key in ("chat_template", "max_length", "min_loss_tokens")}
        return "raw-" + hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def identity(self) -> str:
        """Hash of manifest and index, to tell one raw cache from another."""
        return hashlib.sha256(json.dumps(self._manifest, sort_keys=True).encode() + self._index.tobytes()).hexdigest()[
            :32
        ]

    def sample(self, number: int) -> Sample:
        """Ids, loss mask and id of a sample, without its states.

        Raises:
            InputError: a token of it is padding, or its loss mask is no mask.
        """
        tokens = int(self.lengths[number])
        ids = np.frombuffer(self._bytes(number, "ids", 4 * tokens), "<i4").astype(np.int32)
        attention = np.frombuffer(self._bytes(number, "attention", tokens), np.uint8)
        mask = np.frombuffer(self._bytes(number, "loss", tokens), np.uint8)
        if not attention.all() or mask.max() > 1:
            raise InputError(f"sample {number} of {self.folder} holds padding, or a loss mask that is not of 0 and 1")
        return Sample(sample_id(ids, mask), str(number), None, ids, mask)

    def table(self, origin: Origin, numbers: Sequence[int]) -> pa.Table:
        """The contract's table of these samples."""
        samples = [self.sample(number) for number in numbers]
        taps: dict[int, list[torch.Tensor]] = {tap: [] for tap in self.taps}
        final: list[torch.Tensor] = []
        for number in numbers:
            for tap, state in zip(self.taps, self._states(number, "taps", len(self.taps)), strict=True):
                taps[tap].append(state)
            final += self._states(number, "final", 1)
        return encode(origin, samples, taps, final)

    def unique(self) -> Iterator[tuple[int, str]]:
        """Number and id of every sample that no earlier one equals."""
        seen: set[str] = set()
        for number in range(len(self.lengths)):
            found = self.sample(number).sample_id
            if found not in seen:
                seen.add(found)
                yield number, found

    def close(self) -> None:
        """Closes its shard; the cache can still be read."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def _states(self, number: int, name: str, count: int) -> tuple[torch.Tensor, ...]:
        tokens = int(self.lengths[number])
        data = bytearray(self._bytes(number, name, tokens * count * self.hidden * 2))
        return torch.frombuffer(data, dtype=torch.bfloat16).view(tokens, count * self.hidden).split(self.hidden, dim=-1)

    def _bytes(self, number: int, name: str, size: int) -> bytes:
        shard = int(self._index["shard"][number])
        where = self.folder / self._files[shard]
        try:
            if self._open is None or self._open[0] != shard:
                self.close()
                self._open = (shard, os.open(where, os.O_RDONLY))
            data = os.pread(self._open[1], size, int(self._index[name][number]))
        except OSError as error:
            raise InputError(f"{where} cannot be read: {error.strerror}") from error
        if len(data) != size:
            raise InputError(f"{where} ended while sample {number} was read: it was shortened")
        return data

    def _read_manifest(self) -> dict[str, Any]:
        where = self.folder / MANIFEST
        try:
            values = json.loads(where.read_text(encoding="utf-8"))
            found = {key: values[key] for key in (*_NEEDED, "num_samples", "target_layer_ids", "hidden_size", "shards")}
        except OSError as error:
            raise InputError(f"{where} cannot be read ({error.strerror}): name the folder of a raw cache") from error
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{where} is no manifest of a raw cache: {type(error).__name__} {error}") from error
        for key, needed in _NEEDED.items():
            if found[key] != needed:
                raise InputError(f"{where} says {key}={found[key]!r}, only {needed!r} can be converted")
        return dict(values)

    def _read_index(self) -> NDArray[Any]:
        where = self.folder / INDEX
        try:
            data = where.read_bytes()
        except OSError as error:
            raise InputError(f"{where} cannot be read: {error.strerror}") from error
        wanted = int(self._manifest["num_samples"])
        if len(data) != wanted * _RECORD.itemsize:
            raise InputError(
                f"{where} has {len(data):,} bytes, {wanted:,} samples take {wanted * _RECORD.itemsize:,}: it is damaged"
            )
        return np.frombuffer(data, _RECORD)

    def _check_extents(self) -> None:
        """Every tensor lies within its shard: a shard that is missing or cut is found before anything is written."""
        tokens = self.lengths
        widths = {
            "ids": 4,
            "attention": 1,
            "loss": 1,
            "taps": 2 * len(self.taps) * self.hidden,
            "final": 2 * self.hidden,
        }
        for shard in np.unique(self._index["shard"]):
            file = self.folder / self._files.get(int(shard), f"(shard {shard}, which the manifest does not name)")
            if not file.is_file():
                raise InputError(f"{file} is missing, {INDEX} points to it")
            here = self._index["shard"] == shard
            ends = [self._index[name][here].astype(np.int64) + width * tokens[here] for name, width in widths.items()]
            if (end := int(np.max(ends))) > (size := file.stat().st_size):
                raise InputError(f"{file} has {size:,} bytes, its samples take {end:,}: it is truncated")
        if not tokens.all():
            raise InputError(f"sample {int(np.argmin(tokens))} of {self.folder} has no token")
