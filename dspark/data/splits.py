"""Which conversations are prepared, and for what: duplicates out, then a share each for validation and held-out.

A conversation's split depends on its own text and on the shares alone, so rows that are added move no other row.
"""

import hashlib
from collections.abc import Sequence
from typing import Literal

from dspark.data.conversations import Conversation, Dropped
from dspark.data.dialogue import unanswerable

Split = Literal["train", "validation", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "validation", "held_out")
SAME_QUESTION = "its final user text is that of an earlier row"


def askable(rows: Sequence[Conversation]) -> tuple[list[Conversation], list[Dropped]]:
    """Conversations that can be answered anew, with distinct final user texts; of equal ones the first stays."""
    kept, dropped = [], []
    seen: set[bytes] = set()
    for row in rows:
        reason = unanswerable(row.messages)
        if reason is None:
            question = next(message.content for message in reversed(row.messages) if message.role == "user")
            mark = hashlib.sha256(question.strip().encode()).digest()
            reason = SAME_QUESTION if mark in seen else None
            seen.add(mark)
        if reason is None:
            kept.append(row)
        else:
            dropped.append(Dropped(row.id, row.row, reason))
    return kept, dropped


def split_of(digest: str, validation: float, held_out: float) -> Split:
    """The split of the conversation with this hash."""
    number = int.from_bytes(hashlib.sha256(f"split/{digest}".encode()).digest()[:8], "little") / 2**64
    if number < held_out:
        return "held_out"
    return "validation" if number < held_out + validation else "train"
