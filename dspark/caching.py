"""Section of the settings that says where captured states are kept, how they are stored, and in what portions."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from dspark.sections import Positive, Section


class CacheSettings(Section):
    """The cache of hidden states: written by `capture` and `data.source=live_and_keep`, read by `data.source=cache`."""

    folder: str | None = Field(
        None, description="path, or address such as s3://bucket/folder; null: `output`/cache/`name`"
    )
    storage: Literal["plain", "planes"] = Field(
        "plain",
        description="`planes` takes fewer bytes, loses nothing, and is slower to read: `make bench-cache` measures it",
    )
    taps: Literal["bf16", "int8_outlier"] = Field(
        "bf16", description="`int8_outlier` takes little more than half of the taps' bytes and loses precision"
    )
    limit: Positive | None = Field(
        None,
        description="so many rows from the start: what `capture` writes, and what is trained unless data.source=live; "
        "null: all",
    )
    shard_mb: Positive = Field(
        256, description="of `capture`: largest shard in MB; what it repeats at most when it is killed, per actor"
    )
    window_rows: Positive = Field(1024, description="of `capture`: rows that are sorted by length together")
    max_bad_run: Positive = Field(
        32, description="of `capture`: so many samples in a row with states that are not finite stop it"
    )
    readers: Positive = Field(1, description="actors that read the cache for training")

    @property
    def of_capture(self) -> list[str]:
        """Those settings of `capture` alone that differ from their defaults."""
        keys = ("shard_mb", "window_rows", "max_bad_run")
        return [key for key in keys if getattr(self, key) != CacheSettings.model_fields[key].default]

    def address(self, output: Path, name: str) -> str:
        """Where the cache lies."""
        return self.folder or str(output.resolve() / "cache" / name)
