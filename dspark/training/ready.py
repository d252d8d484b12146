"""Shares made ready beside the steps before them, micro-batch by micro-batch.

    tables -> Share: anchors, blocks, weights, which rows are finite      [thread `shares`, one ahead]
      -> micro-batches collated, their copies to the device begun         [thread `micro-batches`, `depth` ahead]
      -> ReadyShare, in the order of the tables

Waits for: the next table. Bounded by: one table besides the one in use, and `depth` micro-batches besides the one in
use, on the host and on the device. An error is raised where the trainer asks for what it prevents.
"""

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dspark.training.batch import Batch
from dspark.training.blocks import Blocks
from dspark.training.means import Means
from dspark.training.prefetch import prefetched
from dspark.training.share import Share
from dspark.training.transfer import Arrival, Transfer

T = TypeVar("T")
# (phase, seconds) -> None
Book = Callable[[str, float], None]


class _Opening(NamedTuple):
    """What is known of a share before its first micro-batch."""

    weights: Tensor
    counts: Means
    tokens: int
    size: int


class MicroBatch(NamedTuple):
    """A batch and the blocks that are trained on it."""

    batch: Batch
    blocks: Blocks


@dataclass(frozen=True)
class _Piece:
    """One micro-batch under way, and with the first of a share its opening."""

    opening: Arrival[_Opening] | None
    part: Arrival[MicroBatch]
    seconds: float  # that it took to make, waiting left out


@dataclass(frozen=True)
class ReadyShare:
    """A share whose tensors are on the device; its micro-batches are read once, before the next share is asked for."""

    weights: Tensor  # [micro-batches], fp32
    tokens: int
    counts: Means
    micro_batches: Iterator[MicroBatch]


def ready_shares(
    tables: Generator[T, None, None], make: Callable[[T], Share], device: torch.device, depth: int, book: Book
) -> Generator[ReadyShare, None, None]:
    """The shares that `make` gives of `tables`, on the device; `depth` 0: without threads.

    Books what the caller waited for as `waiting`, and as `collate` the work that was done for it, most of it meanwhile.
    To be closed by whoever leaves it before its end.
    """
    shares = prefetched(_timed_shares(tables, make), min(depth, 1), "shares")
    pieces = prefetched(_pieces(shares, Transfer(device)), depth, "micro-batches")
    try:
        while (first := _next(pieces, book)) is not None:
            assert first.opening is not None, "the share before was not read to its end"
            weights, counts, tokens, size = first.opening.get()
            share = ReadyShare(weights, tokens, counts, _micro_batches(first, size, pieces, book))
            del first  # or it would hold its micro-batch for the whole step
            yield share
    finally:
        pieces.close()


def _timed_shares(
    tables: Generator[T, None, None], make: Callable[[T], Share]
) -> Generator[tuple[Share, float], None, None]:
    try:
        for table in tables:
            since = time.perf_counter()
            share = make(table)
            yield share, time.perf_counter() - since
    finally:
        tables.close()


def _pieces(shares: Generator[tuple[Share, float], None, None], transfer: Transfer) -> Generator[_Piece, None, None]:
    try:
        for share, seconds in shares:
            opening = _Opening(share.weights, share.counts, share.tokens, len(share.blocks))
            begun: Arrival[_Opening] | None = transfer.begin(opening)
            for number, blocks in enumerate(share.blocks):
                since = time.perf_counter()
                part = transfer.begin(MicroBatch(share.batches[number], blocks))
                yield _Piece(begun, part, seconds + time.perf_counter() - since)
                begun, seconds = None, 0.0
    finally:
        shares.close()


def _micro_batches(
    piece: _Piece | None, size: int, pieces: Iterator[_Piece], book: Book
) -> Generator[MicroBatch, None, None]:
    """Those of one share, of which `piece` is the first."""
    for number in range(size):
        if number:
            piece = _next(pieces, book)
        assert piece is not None, "the thread of the micro-batches makes all of a share or fails"
        yield piece.part.get()


def _next(pieces: Iterator[_Piece], book: Book) -> _Piece | None:
    since = time.perf_counter()
    piece = next(pieces, None)
    book("waiting", time.perf_counter() - since)
    if piece is not None:
        book("collate", piece.seconds)
    return piece
