"""`dspark inspect`: a file's rows as the trainer will see them, before any model is loaded.

file -> conversations -> template, tokens, loss mask -> anchors of epoch 0 -> terminal, or JSON lines
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from dspark.data.conversations import Conversation, Dropped, read_conversations, reasons
from dspark.data.render import Renderer, Sample, render_rows
from dspark.sections import TargetSettings
from dspark.target_files import load_tokenizer
from dspark.training.blocks import draw_anchors

PROMPT, SUPERVISED, ANCHOR = "dim", "green", "bold underline green"
# Text of a data file must not steer the terminal.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class _Row:
    """One row of the file and what became of it; `anchors` are positions, int64 ascending."""

    number: int
    id: str | None
    result: Sample | Dropped
    anchors: NDArray[np.int64]


def inspect(
    file: Path,
    target: str,
    *,
    as_json: bool,
    max_length: int,
    limit: int | None,
    thinking: bool | None,
    anchors: int,
    seed: int,
) -> None:
    """Print the first `limit` rows of `file` (None: all), each with its supervised tokens and its anchors.

    Bad rows are shown with their reason; InputError is raised only for a file or a target that cannot be used at all.
    With `as_json` each row is a line `{"id", "input_ids", "loss_mask", "anchors", "dropped"}` on stdout, nothing else.
    """
    tokenizer = load_tokenizer(TargetSettings(model=target))
    renderer = Renderer(tokenizer, max_length, thinking)
    rows = _rows(renderer, file, limit, anchors, seed)
    if as_json:
        for row in rows:
            print(_json(row))
    else:
        _show(rows, tokenizer, Console(highlight=False))


def _rows(renderer: Renderer, file: Path, limit: int | None, anchors: int, seed: int) -> Iterator[_Row]:
    read = read_conversations(file, {}, max_bad_fraction=1.0)
    found: list[Conversation | Dropped] = [*read.rows, *read.dropped]
    listed = sorted(found, key=lambda row: row.row)[:limit]
    results = render_rows(renderer, [row for row in listed if isinstance(row, Conversation)])
    for row in listed:
        result = row if isinstance(row, Dropped) else next(results)
        drawn = np.empty(0, dtype=np.int64)
        if isinstance(result, Sample):
            drawn = draw_anchors(result.loss_mask, anchors, seed, epoch=0, sample_id=result.sample_id)
        yield _Row(row.row, row.id, result, drawn)


def _json(row: _Row) -> str:
    sample = row.result if isinstance(row.result, Sample) else None
    return json.dumps(
        {
            "id": row.id,
            "input_ids": sample.input_ids.tolist() if sample else [],
            "loss_mask": sample.loss_mask.tolist() if sample else [],
            "anchors": row.anchors.tolist(),
            "dropped": None if isinstance(row.result, Sample) else row.result.reason,
        }
    )


def _show(rows: Iterator[_Row], tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    legend = Text.assemble(("prompt", PROMPT), ", ", ("supervised", SUPERVISED), ", ", ("anchor", ANCHOR))
    console.print(legend)
    shown = tokens = supervised = 0
    dropped: list[Dropped] = []
    for row in rows:
        shown += 1
        title = _safe(f"row {row.number}" + (f"  id {row.id}" if row.id else ""))
        if isinstance(row.result, Dropped):
            dropped.append(row.result)
            console.print(Text(f"\n{title}  dropped: {_safe(row.result.reason)}", style="yellow"))
            continue
        counts = len(row.result.input_ids), int(row.result.loss_mask.sum())
        tokens, supervised = tokens + counts[0], supervised + counts[1]
        console.print(
            Text(f"\n{title}  {counts[0]} tokens, {counts[1]} supervised, {len(row.anchors)} anchors", style="bold")
        )
        console.print(_coloured(row.result, row.anchors, tokenizer))
    console.print(f"\n{shown} rows, {tokens} tokens, {supervised} supervised tokens, {len(dropped)} rows dropped")
    if dropped:
        console.print(Text(_safe(reasons(dropped))))


def _coloured(sample: Sample, anchors: NDArray[np.int64], tokenizer: PreTrainedTokenizerBase) -> Text:
    """The row's text, token by token; tokens that share a character appear together, in the first one's style."""
    drawn = set(anchors.tolist())
    text = Text()
    pending: list[int] = []
    style = PROMPT
    for position, token in enumerate(sample.input_ids.tolist()):
        if not pending:
            style = ANCHOR if position in drawn else SUPERVISED if sample.loss_mask[position] else PROMPT
        pending.append(token)
        piece = tokenizer.decode(pending, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        # A character of UTF-8 has at most four bytes, so at most four byte tokens.
        if "\ufffd" not in piece or len(pending) == 4 or position + 1 == len(sample.input_ids):
            text.append(_safe(str(piece)), style=style)
            pending = []
    return text


def _safe(text: str) -> str:
    return CONTROL.sub("\ufffd", text)


if __name__ == "__main__":
    from jobs.cli import command_main

    command_main("inspect")
