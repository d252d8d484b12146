"""A prepared folder: rows for training, validation and held-out, what failed and why, and how all of it was made.

conversations + their outcomes in the ledger -> train.jsonl, validation.jsonl, held_out.jsonl | failures.jsonl
                                             -> prepare.json, last: counts, settings, rendering, target

Every conversation of the source ends in exactly one of the four files. Whoever trains on one of them is held to the
manifest beside it: the same target, and the same rendering.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dspark.data.conversations import Conversation, Dropped, Message, refuse_bad_rows
from dspark.data.dialogue import Dialogue
from dspark.data.ledger import Outcome, partial_of, publish, write_whole
from dspark.data.render import Renderer
from dspark.data.splits import SPLITS, Split, split_of
from dspark.errors import InputError

MANIFEST = "prepare.json"
FAILURES = "failures.jsonl"
CUT = "an answer was cut off after max_tokens"
# The setting to change for each fact of a rendering. The maximum length is not compared: it cuts rows at their end and
# changes neither text nor mask before that.
_FACTS = {
    "template": "target.model",
    "thinking": "data.thinking",
    "mask_rule": "the version of dspark",
    "vocabulary": "target.model",
    "special_tokens": "target.model",
}


@dataclass(frozen=True)
class Making:
    """How the rows of a folder are made: `identity` holds the settings that decide the answers, by dotted key."""

    identity: Mapping[str, Any]
    renderer: Renderer
    validation: float
    held_out: float
    keep_cut: bool

    @property
    def settings_hash(self) -> str:
        """Hash of all that decides the answers."""
        return hashlib.sha256(json.dumps(dict(self.identity), sort_keys=True).encode()).hexdigest()[:16]

    def row(self, conversation: Conversation, outcome: Outcome) -> dict[str, Any] | Dropped:
        """The finished row of a conversation, or why it has none."""
        dialogue = Dialogue(conversation)
        for answer in outcome.answers:
            dialogue.take(answer)
        reason = outcome.failure
        if reason is None and dialogue.finish == "length" and not self.keep_cut:
            reason = CUT
        if reason is None:
            rendered = self.renderer.sample(dialogue.row())
            if not isinstance(rendered, Dropped):
                sizes = {"tokens": len(rendered.input_ids), "supervised": int(rendered.loss_mask.sum())}
                return row_json(dialogue.row()) | sizes | {"settings": self.settings_hash}
            reason = rendered.reason
        return Dropped(conversation.id, conversation.row, reason)


def row_json(conversation: Conversation) -> dict[str, Any]:
    """A row that `read_conversations` reads back as the same conversation."""
    row: dict[str, Any] = {"id": conversation.id}
    if conversation.domain is not None:
        row["domain"] = conversation.domain
    row["messages"] = [_message_json(message) for message in conversation.messages]
    if conversation.tools:
        # As text: a column of parquet would give every tool the keys of all others.
        row["tools"] = json.dumps(list(conversation.tools), ensure_ascii=False)
    return row | {"finish": "stop" if conversation.finished else "length"}


def _message_json(message: Message) -> dict[str, Any]:
    context_only = {} if message.supervised else {"train": False}
    return {"role": message.role, "content": message.content, **message.parts, **context_only}


def write_prepared(
    folder: Path,
    making: Making,
    rows: Sequence[Conversation],
    results: Iterable[dict[str, Any] | Dropped],
    dropped: Sequence[Dropped],
    facts: Mapping[str, Any],
    max_bad_fraction: float,
) -> dict[str, Any]:
    """Writes the four files and then the manifest, and returns it. `results` belong to `rows`; `facts` join it.

    Raises:
        InputError: more than `max_bad_fraction` of the rows failed; those that were cut off do not count.
    """
    counts = {split: Counter[str]() for split in SPLITS}
    failed: list[Dropped] = []
    places = [folder / f"{split}.jsonl" for split in SPLITS]
    failures = folder / FAILURES
    with ExitStack() as stack:
        *files, side = [stack.enter_context(partial_of(one).open("w", encoding="utf-8")) for one in (*places, failures)]
        by_split = dict(zip(SPLITS, files, strict=True))
        for one in dropped:
            _write(side, _failure_json(one))
        for conversation, result in zip(rows, results, strict=True):
            split = split_of(conversation.digest, making.validation, making.held_out)
            if isinstance(result, Dropped):
                failed.append(result)
                _write(side, _failure_json(result) | {"split": split})
                continue
            _write(by_split[split], result)
            counts[split].update(rows=1, tokens=result["tokens"], supervised=result["supervised"])
            counts[split]["cut"] += result["finish"] == "length"
    publish(partial_of(failures), failures)
    bad = [one for one in failed if one.reason != CUT]
    refuse_bad_rows(f"answering {facts['source']} ({failures})", len(rows), bad, max_bad_fraction)
    (folder / MANIFEST).unlink(missing_ok=True)  # it describes the files that are replaced now
    for place in places:
        publish(partial_of(place), place)
    manifest = {
        "settings": dict(making.identity),
        "settings_hash": making.settings_hash,
        "render": making.renderer.facts,
        "render_hash": making.renderer.settings_hash,
        **facts,
        "files": {f"{split}.jsonl": _counted(counts[split]) for split in SPLITS},
        "failures": dict(Counter(one.reason for one in [*dropped, *failed]).most_common()),
    }
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    return manifest


def _counted(counts: Counter[str]) -> dict[str, int]:
    return {name: counts[name] for name in ("rows", "tokens", "supervised", "cut")}


def _failure_json(one: Dropped) -> dict[str, Any]:
    return {"id": one.id, "row": one.row, "reason": one.reason}


def _write(file: IO[str], row: Mapping[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")


def split_counts(rows: Sequence[Conversation], validation: float, held_out: float) -> dict[Split, int]:
    """How many conversations fall to each split."""
    found = Counter(split_of(row.digest, validation, held_out) for row in rows)
    return {split: found[split] for split in SPLITS}


def check_prepared(file: Path, renderer: Renderer, fingerprint: str) -> None:
    """Holds a run to the manifest beside its data file, if there is one that names the file.

    Raises:
        InputError: the answers are another target's, or were rendered otherwise; what differs is named.
    """
    manifest = file.parent / MANIFEST
    if not manifest.is_file():
        return
    try:
        found = json.loads(manifest.read_text(encoding="utf-8"))
        if file.name not in found["files"]:
            return
        theirs, rendering = found["target"]["fingerprint"], found["render"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{manifest} says how {file.name} was made, but cannot be read ({type(error).__name__}: {error}): make the "
            "folder again with `dspark prepare --resume`, or move the file elsewhere"
        ) from error
    if theirs != fingerprint:
        raise InputError(
            f"{file} holds answers of the target {found['target']['name']} (weights {theirs}), this run's target has "
            f"the weights {fingerprint}: set target.model to it, or prepare the conversations with this target"
        )
    for fact, setting in _FACTS.items():
        if rendering.get(fact) != renderer.facts[fact]:
            raise InputError(
                f"{file} was prepared with the rendering {fact}={rendering.get(fact)!r}, this run has "
                f"{renderer.facts[fact]!r}: the drafter would learn from a text that the target never saw; look at "
                f"{setting}, or prepare the conversations again"
            )
