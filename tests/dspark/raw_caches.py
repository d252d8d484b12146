"""Raw caches as the published training code writes them, byte by byte, from captured tables."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from dspark.data.captures import bf16_column
from dspark.data.origin import origin_of, tap_column


def write_raw(folder: Path, tables: Sequence[pa.Table], **fields: Any) -> Path:
    """One shard per table; keywords replace fields of the manifest."""
    folder.mkdir()
    origin = origin_of(tables[0].schema)
    index, number = b"", 0
    for shard, table in enumerate(tables):
        data = b""
        for row in range(table.num_rows):
            ids = table.column("input_ids")[row].as_py()
            taps = [bf16_column(table, tap_column(tap), row, origin.hidden) for tap in origin.taps]
            parts = [
                struct.pack(f"<{len(ids)}i", *ids),
                b"\x01" * len(ids),
                table.column("loss_mask")[row].as_py(),
                torch.cat(taps, dim=-1).view(torch.uint8).numpy().tobytes(),
                table.column("final")[row].as_py(),
            ]
            offsets = [len(data) + sum(map(len, parts[:part])) for part in range(5)]
            index += struct.pack("<QIIQQQQQ", number, shard, len(ids), *offsets)
            data += b"".join(parts)
            number += 1
        (folder / f"shard-{shard:05d}.bin").write_bytes(data)
    (folder / "samples.idx").write_bytes(index)
    manifest = {
        "version": 2,
        "num_samples": number,
        "num_shards": len(tables),
        "target_layer_ids": list(origin.taps),
        "hidden_dtype": "bfloat16",
        "token_dtype": "int32",
        "mask_dtype": "uint8",
        "index_record_size": 56,
        "hidden_size": origin.hidden,
        "shards": [{"shard_id": shard, "file_name": f"shard-{shard:05d}.bin"} for shard in range(len(tables))],
        "target_model_name_or_path": origin.target,
        "chat_template": "qwen",
        "max_length": 64,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest | fields))
    return folder
