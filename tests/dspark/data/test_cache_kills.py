"""A writer that is killed at any moment, or whose disk is full, leaves in the end what an undisturbed one leaves."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dspark.data.cache_check import verify
from dspark.data.cache_reader import CacheReader
from dspark.data.folder import Folder
from dspark.errors import InputError
from tests.dspark.caches import name, table, write_cache

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[3]
SHARDS = [(3 * number, 3 * number + 1, 3 * number + 2) for number in range(10)]
# Each attempt is a process of its own, which an alarm of the kernel kills; the last one lives to the end.
PROGRAM = """
import os, random, signal, sys
from tests.dspark.caches import write_cache
from tests.dspark.data.test_cache_kills import SHARDS

generator, kills, longest = random.Random(0), 0, 0.01
while True:
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_REAL, generator.uniform(0.001, longest))  # ends it like SIGKILL: at once
        write_cache(sys.argv[1], shards=SHARDS)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGALRM, status
    kills, longest = kills + 1, longest * 1.3
print(kills)
"""


def test_a_writer_killed_at_any_moment_leaves_the_same_cache(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(killed)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 4
    write_cache(whole, shards=SHARDS)
    for file in sorted(path.name for path in whole.iterdir() if path.name != ".lock"):
        assert (killed / file).read_bytes() == (whole / file).read_bytes(), file
    assert {path.name for path in killed.iterdir()} == {path.name for path in whole.iterdir()}
    assert verify(Folder(killed), 1, lambda _: None) == []
    numbers = [number for shard in SHARDS for number in shard]
    assert CacheReader(str(killed)).table([name(number) for number in numbers]).equals(table(numbers))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_told_and_once_there_is_room_the_same_command_goes_on(small_disk: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be written, after .* bytes: No space left on device"):
        write_cache(small_disk, shards=SHARDS)
    left = sorted(path.name for path in small_disk.glob("*shard*"))
    assert "shard-000000.ledger" in left and not [name for name in left if name.endswith(".partial")]
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    write_cache(small_disk, shards=SHARDS)
    write_cache(tmp_path / "whole", shards=SHARDS)
    for file in (tmp_path / "whole").glob("[!.]*"):
        assert (small_disk / file.name).read_bytes() == file.read_bytes()
