"""A cache being written: planned shards, written by any number of processes, joined by one.

    planned batches -> shards of bounded size ──> write_shard in any process, in any order ──> finish: ledger, manifest
                       unfinished(): what a killed run left to do

A shard is the unit of resume: it is there with its part of the ledger, or it is written again. What it holds is a pure
function of the plan, so a resumed run leaves the same bits as an undisturbed one.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, Self

from dspark.data.codecs import SHARE, Codec
from dspark.data.folder import Folder
from dspark.data.manifest import MANIFEST, Manifest, Setting, damaged_shards, read_manifest, write_manifest
from dspark.data.origin import Origin, final_column, tap_column
from dspark.data.shard_record import ShardRecord, read_record, record_file, shard_file
from dspark.data.shards import ShardTask, check_same_origin
from dspark.errors import InputError

# Page headers, ledger, and what the estimate of a codec may be off.
_ROOM = 1.02
JOB, LOCK = "writing.json", ".lock"
# Parts of the ledger are small; an object store answers each only after some tens of milliseconds.
_READERS = 8


def bytes_per_token(origin: Origin) -> int:
    """Bytes of one captured token as the contract holds it: states in bf16, its id, its mask."""
    return (len(origin.taps) + 1) * origin.hidden * 2 + 5


def expected_bytes(origin: Origin, codec: Codec, tokens: int) -> int:
    """About how many bytes the shards of so many tokens take."""
    columns = [*map(tap_column, origin.taps), final_column()]
    states = sum(SHARE[codec.form(column)] for column in columns) * origin.hidden * 2
    return round(tokens * (states + 5))


def check_room(address: str, needed: int, beside: int = 0) -> None:
    """Refuses a cache that cannot fit: better now than after a day. A file system that counts no space passes.

    `beside` are bytes of something else that will lie on the same disk.

    Raises:
        InputError: says how much there is and how much is needed.
    """
    free = Folder(address).free_bytes()
    if free is not None and free < needed * _ROOM + beside:
        also = f", the run on the same disk {beside / 1e9:,.1f} GB" if beside else ""
        raise InputError(
            f"{address} has {free / 1e9:,.1f} GB of free space, the cache takes about {needed / 1e9:,.1f} GB{also}: "
            "free some, write elsewhere, or store less (fewer taps, shorter rows, storage planes, taps int8_outlier)"
        )


def plan_shards(
    batches: Sequence[Sequence[int]], lengths: Sequence[int], token_bytes: int, shard_bytes: int
) -> list[range]:
    """Which batches go into which shard: consecutive ones, at most `shard_bytes` together.

    `batches` are rows that are captured together, and are never divided; one that is larger than `shard_bytes` is a
    shard of its own. `lengths` are tokens of all rows.
    """
    shards: list[range] = []
    filled = 0
    for number, batch in enumerate(batches):
        size = sum(lengths[row] for row in batch) * token_bytes
        if shards and filled + size <= shard_bytes:
            shards[-1] = range(shards[-1].start, number + 1)
            filled += size
        else:
            shards.append(range(number, number + 1))
            filled = size
    return shards


class CacheWriter:
    """One cache being written, held by one process at a time; others get its `task` and call `write_shard`.

    `shards` are the planned sample ids of each shard, `settings` whatever else decides the states' bits (such as tokens
    per batch). A folder that was begun before is gone on with iff all of these are equal; of a complete one only shards
    that are missing or cut are left. Entering it raises InputError if the folder is another cache, or is being written
    by another process.

    On a local disk a lock keeps a second writer out. On an object store there is none: two writers of one plan repeat
    each other's work, and leave the same objects.
    """

    def __init__(
        self,
        address: str,
        origin: Origin,
        codec: Codec,
        shards: Sequence[Sequence[str]],
        settings: Mapping[str, Setting],
    ) -> None:
        assert origin.codec == codec.in_origin, "the origin does not say how the codec changes values"
        self._folder = Folder(address)
        self._shards, self._settings = shards, dict(settings)
        self._lock: int | None = None
        self.task = ShardTask(self._folder.address, origin, codec)
        self.plan = _plan_identity(shards)

    def __enter__(self) -> Self:
        self._folder.make()
        self._take_lock()
        try:
            self._begin()
        except BaseException:
            self._release_lock()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release_lock()

    @property
    def complete(self) -> bool:
        """Whether the manifest is there."""
        return MANIFEST in self._folder.sizes()

    def unfinished(self) -> list[int]:
        """Shards that are still to be written, ascending: those without their file, of its size, and a ledger part.

        Raises:
            InputError: a finished shard holds other samples than planned, or a complete cache lacks its ledger.
        """
        if self.complete:
            return damaged_shards(self._folder, read_manifest(self._folder))
        return sorted(set(range(len(self._shards))) - self._finished().keys())

    @property
    def all_written(self) -> bool:
        """Whether every shard has its file, and the ledger its part, by their names alone: quick to ask again."""
        names, every = self._folder.sizes().keys(), range(len(self._shards))
        return all(shard_file(i) in names and bool({record_file(i), MANIFEST} & names) for i in every)

    def skipped(self) -> list[str]:
        """Planned samples that the finished shards were not given."""
        return [sample for record in self._finished().values() for sample in record.skipped]

    def finish(self) -> Manifest:
        """Joins the parts of the ledger and writes the manifest; afterwards the cache can be read.

        Raises:
            InputError: shards are missing.
        """
        complete, every = self.complete, range(len(self._shards))
        records = {} if complete else self._finished()
        if missing := self.unfinished() if complete else sorted(set(every) - records.keys()):
            raise InputError(f"{self._folder.address} lacks {len(missing)} shards, the first is {missing[0]}")
        if not complete:
            in_order = [records[index] for index in every]
            write_manifest(self._folder, self.task.origin, self.task.codec, self._settings, self.plan, in_order)
        self._clear()
        return read_manifest(self._folder)

    def _finished(self) -> dict[int, ShardRecord]:
        """Records of the shards that are there, each with its file, of its size, and its part of the ledger."""
        sizes = self._folder.sizes()
        there = [index for index in range(len(self._shards)) if {shard_file(index), record_file(index)} <= sizes.keys()]
        with ThreadPoolExecutor(_READERS) as readers:
            records = list(readers.map(lambda index: read_record(self._folder, index), there))
        for record in records:
            ids = [*record.rows.column("sample_id").to_pylist(), *record.skipped]
            if sorted(ids) != sorted(self._shards[record.index]):
                where = self._folder.where(record.file)
                raise InputError(f"{where} holds other samples than planned: name a new folder")
        return {record.index: record for record in records if record.bytes == sizes[record.file]}

    def check(self) -> Origin:
        """Refuses, as entering it does, a folder that is another cache or none; writes nothing.

        Returns the origin of its shards: the target may have had another name. Raises InputError: names what differs.
        """
        if self.complete:
            manifest = read_manifest(self._folder)
            self._check_same(manifest.origin, manifest.codec, manifest.settings, manifest.plan)
            return manifest.origin
        names = self._folder.sizes().keys() - {LOCK}
        if JOB in names:
            return self._check_begun()
        if names:
            raise InputError(
                f"{self._folder.address} holds {len(names)} files that no cache of this kind begins with, such as "
                f"{min(names)}: name a new folder"
            )
        return self.task.origin

    def _begin(self) -> None:
        self.task = replace(self.task, origin=self.check(), complete=self.complete)
        if self.task.complete:
            for index in self.unfinished():  # damaged ones: from now on names alone tell what is there
                self._folder.remove(shard_file(index))
            self._clear()
            return
        if JOB not in self._folder.sizes():
            self._folder.write(JOB, json.dumps(self._job(), indent=1).encode())
        self._folder.remove_partial()
        self._forget_damaged()

    def _forget_damaged(self) -> None:
        """Removes the ledger parts of shards that are missing or cut: from now on names tell what is written."""
        names, whole = self._folder.sizes().keys(), self._finished().keys()
        for index in range(len(self._shards)):
            if index not in whole and record_file(index) in names:
                self._folder.remove(record_file(index))

    def _clear(self) -> None:
        """Removes what only a cache in the making needs."""
        for name in self._folder.sizes():
            if name == JOB or name.endswith(".ledger"):
                self._folder.remove(name)
        self._folder.remove_partial()

    def _job(self) -> dict[str, Any]:
        """All that decides the shards' bits."""
        task = self.task
        return {
            "origin": asdict(task.origin),
            "codec": asdict(task.codec),
            "settings": self._settings,
            "plan": self.plan,
        }

    def _check_begun(self) -> Origin:
        try:
            values = json.loads(self._folder.read(JOB))
            origin = Origin(**{**values["origin"], "taps": tuple(values["origin"]["taps"])})
            codec, settings, plan = Codec(**values["codec"]), dict(values["settings"]), values["plan"]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{self._folder.where(JOB)} is damaged: begin again in a new folder") from error
        self._check_same(origin, codec, settings, plan)
        return origin

    def _check_same(self, origin: Origin, codec: Codec, settings: Mapping[str, Setting], plan: str) -> None:
        where = f"the cache {self._folder.address}"
        check_same_origin(origin, self.task.origin, where)
        pairs = [(f"codec.{key}", value, asdict(self.task.codec)[key]) for key, value in asdict(codec).items()]
        keys = sorted(settings.keys() | self._settings.keys())
        pairs += [(key, settings.get(key), self._settings.get(key)) for key in keys]
        pairs.append(("plan", plan, self.plan))
        for field, found, wanted in pairs:
            if found != wanted:
                raise InputError(
                    f"{where} was begun with {field}={found!r}, this run has {wanted!r}: repeat the run with the same "
                    "data and settings, or name a new folder"
                )

    def _take_lock(self) -> None:
        if self._folder.local is None:
            return
        try:
            self._lock = os.open(self._folder.local / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(
                f"{self._folder.address} cannot be written: {error.strerror}: name another folder"
            ) from error
        try:
            # The kernel gives it back when the process ends, however it ends.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock, 100, 0).decode(errors="replace").strip()
            self._release_lock()
            raise InputError(
                f"{self._folder.address} is being written by another process ({holder or 'unknown'}): wait for it, or "
                "name a new folder"
            ) from error
        except OSError:
            # A file system that knows no locks: what holds for object stores holds here.
            return
        with suppress(OSError):  # on a full disk; it only makes the message above say more
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)

    def _release_lock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _plan_identity(shards: Sequence[Sequence[str]]) -> str:
    """Hash of which samples are in which shard, in which order."""
    digest = hashlib.sha256()
    for ids in shards:
        digest.update((" ".join(ids) + "\n").encode())
    return digest.hexdigest()[:32]
