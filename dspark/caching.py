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
        "plain", description="`planes` takes 0.70 of the bytes, loses nothing, and is several times slower to read"
    )
    taps: Literal["bf16", "int8_outlier"] = Field(
        "bf16", description="`int8_outlier` takes about 0.53 of the taps' bytes and loses precision"
    )
    limit: Positive | None = Field(None, description="capture so many rows from the start; null: all")
    shard_mb: Positive = Field(
        256, description="largest shard in MB; what a killed `capture` repeats at most, per actor"
    )
    window_rows: Positive = Field(1024, description="rows that `capture` sorts by length together")
    max_bad_run: Positive = Field(32, description="samples in a row with states that are not finite: stops `capture`")
    readers: Positive = Field(1, description="actors that read the cache for training")

    def address(self, output: Path, name: str) -> str:
        """Where the cache lies."""
        return self.folder or str(output.resolve() / "cache" / name)
