"""Raw rows of files: JSON lines, JSON or parquet, each also as .gz, alone or as the files of a folder."""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dspark.errors import InputError

SUFFIXES = tuple(f"{suffix}{gz}" for suffix in (".jsonl", ".json", ".parquet") for gz in ("", ".gz"))
MESSAGE_KEYS = ("messages", "conversations", "turns")
LABEL_KEYS = ("id", "domain", "category", "finish", "tools")


class Unusable(Exception):
    """The reason why the row at hand is dropped."""


def files_of(path: Path) -> list[Path]:
    """The file, or the files of a folder in name order.

    Raises:
        InputError: there is no such path, or nothing there has one of SUFFIXES.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES) and file.name[0] != ".")
        if not files:
            raise InputError(f"folder {path} holds no conversations: it needs files that end in {', '.join(SUFFIXES)}")
        return files
    if not path.exists():
        raise InputError(f"{path} does not exist: give a file that ends in {', '.join(SUFFIXES)}, or a folder of them")
    if not path.name.endswith(SUFFIXES):
        raise InputError(f"{path} has an unsupported suffix: needed is one of {', '.join(SUFFIXES)}")
    return [path]


def numbered(files: Sequence[Path]) -> Iterator[tuple[int, Any]]:
    """(row number, raw row) through all files; a row that is no JSON comes as the Unusable that says so."""
    before = 0
    for file in files:
        row = 0
        try:
            for row, raw in _rows_of(file):
                yield before + row, raw
        except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
            raise InputError(f"{file} cannot be read after row {row}: {error}; write it again") from error
        before += row


def _rows_of(file: Path) -> Iterator[tuple[int, Any]]:
    if file.suffix == ".gz" and file.stat().st_size == 0:
        raise EOFError("it has no bytes, not even those of an empty archive")
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
        if file.suffix == ".parquet":
            yield from enumerate(_parquet_rows(file, file), start=1)
            return
        if file.name.endswith(".parquet.gz"):
            # A parquet file is read from its end, so it has to be unpacked whole.
            yield from enumerate(_parquet_rows(file, BytesIO(stream.read())), start=1)
            return
        if file.name.removesuffix(".gz").endswith(".json"):
            yield from enumerate(_json_list(file, stream.read()), start=1)
            return
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, _json_line(line)


def _parquet_rows(file: Path, source: Path | BytesIO) -> Iterator[Any]:
    with pq.ParquetFile(source) as table:
        found = table.schema_arrow.names
        if not set(found) & set(MESSAGE_KEYS):
            raise InputError(f"{file} holds the columns {found}: one of {', '.join(MESSAGE_KEYS)} is needed")
        columns = [name for name in found if name in MESSAGE_KEYS + LABEL_KEYS]
        for batch in table.iter_batches(batch_size=256, columns=columns):
            yield from map(without_nulls, batch.to_pylist())


def without_nulls(value: Any) -> Any:
    """A nested value without the keys that a struct column adds because another row has them."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value


def _json_list(file: Path, text: bytes) -> list[Any]:
    if not text.strip():
        return []
    try:
        data = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not valid JSON: {error}; if it holds one row per line, name it .jsonl") from error
    lists = [value for value in data.values() if isinstance(value, list)] if isinstance(data, dict) else [data]
    if len(lists) != 1 or not isinstance(lists[0], list):
        raise InputError(
            f"{file} holds {kind_of(data)}: needed is a list of rows, or an object with one key that has it"
        )
    return lists[0]


def _json_line(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        return Unusable(f"the line is not valid JSON: {error.msg}")
    except UnicodeDecodeError:
        return Unusable("the line is not valid UTF-8")
    except (ValueError, RecursionError):
        return Unusable("the line is not valid JSON: a number or the nesting is too large")


def kind_of(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a truth value",
        int: "a number",
        float: "a number",
    }
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
