"""The data contract: one Arrow table of captured samples, the same in memory, on the wire and on disk.

One row per sample, no nulls: `sample_id string`, `input_ids list<int32>`, `loss_mask binary` (a byte per token),
`tap_{k} large_binary` for each tap k and `final large_binary` (bf16 little-endian, S*H*2 bytes). The schema's metadata
carries the `Origin`; a table whose Origin differs from what a run needs is refused, naming the field.

Without torch: processes that only pass tables on import this, and start sooner.
"""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

import pyarrow as pa

from dspark.errors import InputError

FORMAT_VERSION = 1
_ORIGIN_KEY = b"dspark.origin"


@dataclass(frozen=True)
class Origin:
    """Where captured states come from: everything that decides their values."""

    target: str
    revision: str
    fingerprint: str
    render: str
    taps: tuple[int, ...]
    hidden: int
    dtype: str
    final: str = "post_norm"
    codec: str = "plain"  # what storing did to the values, if it lost any; how they lie on disk is the cache's matter
    format_version: int = FORMAT_VERSION

    def check_fits(self, needed: "Origin", where: str) -> None:
        """Passes iff this origin has the needed taps and every other field is equal.

        Targets of equal fingerprint are equal whatever their names: a local target may lie in any folder.

        Raises:
            InputError: names the first differing field, what was found and what is needed.
        """
        if missing := sorted(set(needed.taps) - set(self.taps)):
            raise InputError(f"{where} lacks taps {missing} (it holds {list(self.taps)}): capture again with them")
        ignored = {"taps"} | ({"target", "revision"} if self.fingerprint == needed.fingerprint else set())
        for field in fields(self):
            found, wanted = getattr(self, field.name), getattr(needed, field.name)
            if field.name not in ignored and found != wanted:
                raise InputError(f"{where} was captured with {field.name}={found!r}, this run needs {wanted!r}")


def tap_column(tap: int) -> str:
    """Column name of a tap."""
    return f"tap_{tap}"


def final_column() -> str:
    """Column name of the normed last state."""
    return "final"


def schema_of(origin: Origin) -> pa.Schema:
    """The contract's schema for an origin."""
    columns = [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.binary(), nullable=False),
        *(pa.field(tap_column(tap), pa.large_binary(), nullable=False) for tap in origin.taps),
        pa.field(final_column(), pa.large_binary(), nullable=False),
    ]
    return pa.schema(columns, metadata={_ORIGIN_KEY: json.dumps(asdict(origin)).encode()})


def origin_of(schema: pa.Schema) -> Origin:
    """The origin that a schema carries.

    Raises:
        InputError: the schema carries none, or one of another format version.
    """
    raw = (schema.metadata or {}).get(_ORIGIN_KEY)
    if raw is None:
        raise InputError("the table carries no origin: it was not written by this project's capture")
    values: dict[str, Any] = json.loads(raw)
    if values.get("format_version") != FORMAT_VERSION:
        raise InputError(
            f"the table has format version {values.get('format_version')}, this version reads {FORMAT_VERSION}"
        )
    return Origin(**{**values, "taps": tuple(values["taps"])})


_FAULT = "fault: "


def fault_table(origin: Origin, rows: int, message: str) -> pa.Table:
    """What takes the place of `rows` captured rows that cannot be had: whoever takes one of them learns why.

    An exception would reach the trainers with a traceback for its text; with rows, all ranks meet it at the same step.
    """
    schema = schema_of(origin)
    empty: dict[str, Any] = {"sample_id": _FAULT + message, "input_ids": []}
    return pa.table([pa.array([empty.get(field.name, b"")] * rows, field.type) for field in schema], schema=schema)


def refuse_fault(table: pa.Table) -> None:
    """Raises InputError if a row stands for one that could not be had, with the reason."""
    for sample in table.column("sample_id").to_pylist():
        if sample.startswith(_FAULT):
            raise InputError(sample.removeprefix(_FAULT))
