"""A complete cache of which shards are gone or cut: they are written again, and must be those that were there.

manifest -> damaged shards, removed -> write_shard, as ever -> their new ledger parts against the manifest

Manifest and ledger stay as they are: a shard is a pure function of the plan, so the same target gives the same bytes.
"""

from dspark.data.folder import Folder
from dspark.data.manifest import Manifest
from dspark.data.shard_record import read_record, record_file
from dspark.errors import InputError


def damaged_shards(folder: Folder, manifest: Manifest) -> list[int]:
    """Shards whose file is missing or of another size than the manifest says, ascending; reads none of them."""
    sizes = folder.sizes()
    return [index for index, shard in enumerate(manifest.shards) if sizes.get(shard.file) != shard.bytes]


def begin_repair(folder: Folder, manifest: Manifest) -> None:
    """Removes what is left of damaged shards: from now on names alone tell what is there.

    Raises:
        InputError: a shard that a killed run wrote again has other bytes than the manifest says; it is removed.
    """
    for index in damaged_shards(folder, manifest):
        folder.remove(manifest.shards[index].file)
        folder.remove(record_file(index))
    _accept_rewritten(folder, manifest)


def finish_repair(folder: Folder, manifest: Manifest) -> None:
    """Passes iff every shard is there again.

    Raises:
        InputError: shards are missing, or one has other bytes than the manifest says, and is removed.
    """
    if missing := damaged_shards(folder, manifest):
        raise InputError(f"{folder.address} lacks {len(missing)} shards, the first is {missing[0]}")
    _accept_rewritten(folder, manifest)


def _accept_rewritten(folder: Folder, manifest: Manifest) -> None:
    """Compares shards that were written again, of which alone there are ledger parts, and takes those away."""
    names = folder.sizes().keys()
    for index, shard in enumerate(manifest.shards):
        if record_file(index) not in names:
            continue
        record = read_record(folder, index)
        same = (record.bytes, record.crc32) == (shard.bytes, shard.crc32)
        if not same:
            folder.remove(shard.file)
        folder.remove(record_file(index))
        if not same:
            raise InputError(
                f"{folder.where(shard.file)} was damaged, and what was written again has other bytes than the manifest "
                "says, as a target on another kind of device gives: repeat it where the cache was written, or capture "
                "into a new folder"
            )
