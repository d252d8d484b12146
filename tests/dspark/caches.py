"""Small caches whose every state is a function of its sample's number alone, so that any writer gives the same bits."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dspark.data.cache import CacheWriter
from dspark.data.captures import encode
from dspark.data.codecs import Codec
from dspark.data.manifest import Manifest
from dspark.data.origin import Origin, schema_of
from dspark.data.render import Sample
from dspark.data.shards import write_shard

HIDDEN = 64
TAPS = (-1, 2, 5)
PLAIN = Codec()
# Samples 0..6 in three shards.
SHARDS = ((0, 1, 2), (3, 4), (5, 6))


def origin_for(codec: Codec = PLAIN, taps: tuple[int, ...] = TAPS) -> Origin:
    return Origin("name", "main", "weights", "render", taps, HIDDEN, "bf16", codec=codec.in_origin)


def name(number: int) -> str:
    return f"id-{number}"


def length(number: int) -> int:
    return 1 + number * 7 % 11


def sample(number: int) -> Sample:
    ids = np.arange(length(number), dtype=np.int32) + 1000 * number
    return Sample(name(number), f"c-{number}", None, ids, (ids % 2).astype(np.uint8))


def states(number: int, column: int) -> Tensor:
    """Normal values with one channel that is a hundred times larger, as targets have them. [S, H], bf16"""
    generator = torch.Generator().manual_seed(1000 * number + column + 1)
    values = torch.randn(length(number), HIDDEN, generator=generator)
    values[:, 7] *= 100
    return values.bfloat16()


def table(numbers: Sequence[int], taps: tuple[int, ...] = TAPS) -> pa.Table:
    """What a target gives for these samples."""
    by_tap = {tap: [states(number, tap) for number in numbers] for tap in taps}
    return encode(origin_for(PLAIN, taps), [sample(n) for n in numbers], by_tap, [states(n, 99) for n in numbers])


def planned(shards: Sequence[Sequence[int]] = SHARDS) -> list[list[str]]:
    return [[name(number) for number in shard] for shard in shards]


def write_cache(
    address: str | Path,
    codec: Codec = PLAIN,
    shards: Sequence[Sequence[int]] = SHARDS,
    taps: tuple[int, ...] = TAPS,
    **origin: Any,
) -> Manifest:
    """A complete cache; keywords replace fields of its origin."""
    here = replace(origin_for(codec, taps), **origin)
    with CacheWriter(str(address), here, codec, planned(shards), {"batch_tokens": 64}) as writer:
        for index in writer.unfinished():
            given = table(shards[index], taps)
            given = given.replace_schema_metadata(schema_of(replace(here, codec=PLAIN.in_origin)).metadata)
            write_shard(writer.task, index, planned(shards)[index], [given])
        return writer.finish()
