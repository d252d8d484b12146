"""Captures that are killed in the middle and go on: real processes and signals, the bits of an undisturbed one."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from dspark.data.cache_check import verify
from dspark.data.cache_reader import CacheReader
from dspark.data.folder import Folder
from tests.conftest import tiny_preset
from tests.jobs import runs

pytestmark = pytest.mark.faults
start = partial(runs.start, command="capture")
ROWS = 900


def wait_for_shards(run: subprocess.Popen[str], folder: Path, count: int) -> None:
    """Returns as soon as `count` shards are there, with the capture still at work."""
    deadline = time.monotonic() + 240
    while len(list(folder.glob("*.ledger"))) < count:
        assert run.poll() is None, run.communicate()[1][-3000:]
        assert time.monotonic() < deadline, "no shard appeared"
        time.sleep(0.005)


def finish(run: subprocess.Popen[str]) -> str:
    output, errors = run.communicate(timeout=280)
    assert run.returncode == 0, errors[-3000:]
    return output


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> tuple[str, Path]:
    """A preset whose rows fill some twenty shards, and the cache of its undisturbed capture."""
    folder = tmp_path_factory.mktemp("whole")
    target = shutil.copytree(tiny_target, folder / "target")
    changes = {"targets": {"batch_tokens": 256}, "cache": {"shard_mb": 1}}
    preset = str(tiny_preset(folder, target, ROWS, **changes))
    finish(start(preset, f"cache.folder={folder / 'cache'}"))
    assert len(list((folder / "cache").glob("shard-*"))) > 20
    return preset, folder / "cache"


def assert_same(found: Path, expected: Path) -> None:
    """The two caches are the same, byte for byte, in everything that is read."""
    names = {file.name for file in expected.glob("[a-z]*")}
    assert {file.name for file in found.glob("[a-z]*")} == names and len(names) > 20
    assert all((found / name).read_bytes() == (expected / name).read_bytes() for name in names)
    assert verify(Folder(found), 1, lambda _: None) == []
    assert len(CacheReader(str(found)).sample_ids) == ROWS


def killed(preset: str, folder: Path, kill: Callable[[subprocess.Popen[str]], None], *overrides: str) -> None:
    run = start(preset, f"cache.folder={folder}", *overrides)
    wait_for_shards(run, folder, 2)
    kill(run)
    assert not (folder / "manifest.json").exists(), "the capture was faster than the kill"


def test_a_killed_capture_resumes_with_the_bits_of_the_undisturbed_one_and_writes_no_shard_twice(
    whole: tuple[str, Path], tmp_path: Path
) -> None:
    preset, expected = whole
    folder = tmp_path / "cache"

    def kill(run: subprocess.Popen[str]) -> None:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()

    killed(preset, folder, kill)
    finished = {file.name: file.stat().st_mtime_ns for file in folder.glob("shard-*.parquet")}
    assert 0 < len(finished) < len(list(expected.glob("shard-*")))

    target = Path(preset).parent / "target"
    template = (target / "chat_template.jinja").read_text()
    (target / "chat_template.jinja").write_text(template.replace("<|im_end|>\n{% endfor %}", "<|im_end|> {% endfor %}"))
    refused = start(preset, "--resume", str(folder))
    _, errors = refused.communicate(timeout=280)
    (target / "chat_template.jinja").write_text(template)
    assert refused.returncode == 2 and "was captured with render=" in " ".join(errors.split())

    finish(start(preset, "--resume", str(folder)))
    assert_same(folder, expected)
    # The last one before the kill may lack its part of the ledger.
    kept = [name for name, written in finished.items() if (folder / name).stat().st_mtime_ns == written]
    assert len(kept) >= len(finished) - 2


def test_a_target_actor_that_is_killed_is_replaced_and_its_shard_is_written_again(
    whole: tuple[str, Path], tmp_path: Path
) -> None:
    preset, expected = whole
    folder = tmp_path / "cache"
    running = []

    def kill(run: subprocess.Popen[str]) -> None:
        running.append(run)
        actors = [p for p in psutil.Process(run.pid).children(recursive=True) if "ShardActor" in " ".join(p.cmdline())]
        assert len(actors) == 1
        actors[0].kill()

    killed(preset, folder, kill)
    finish(running[0])
    assert_same(folder, expected)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head that drives, and has no room for a target; it notices within seconds that a node is dead."""
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    head = {"num_cpus": 3, "object_store_memory": 100 * 2**20, "include_dashboard": False, "_system_config": quick}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    yield nodes
    nodes.shutdown()


def test_a_node_that_is_killed_takes_its_target_along_and_the_capture_goes_on_where_another_joins(
    whole: tuple[str, Path], cluster: Cluster, tmp_path: Path
) -> None:
    preset, expected = whole
    folder = tmp_path / "cache"
    room_for_a_target: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 100 * 2**20}
    node = cluster.add_node(**room_for_a_target)
    running = []

    def kill(run: subprocess.Popen[str]) -> None:
        running.append(run)
        cluster.remove_node(node, allow_graceful=False)

    killed(preset, folder, kill, f"ray.address={cluster.address}", "targets.cpus=4")
    written = len(list(folder.glob("*.ledger")))
    cluster.add_node(**room_for_a_target)
    finish(running[0])
    assert 2 <= written < len(list(expected.glob("shard-*")))
    assert_same(folder, expected)


@pytest.fixture
def own_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 MB, some three caches."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_someone_else_fills_ends_the_capture_with_the_reason_and_it_goes_on_once_there_is_room(
    whole: tuple[str, Path], own_disk: Path
) -> None:
    preset, expected = whole
    folder = own_disk / "cache"
    running = []

    def fill(run: subprocess.Popen[str]) -> None:
        running.append(run)
        with suppress(OSError), (own_disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(2**16))

    killed(preset, folder, fill)
    _, errors = running[0].communicate(timeout=280)
    told = " ".join(errors.split())
    assert running[0].returncode == 2, errors[-3000:]
    assert "No space left on device" in told and "cannot be written" in told
    refused = start(preset, "--resume", str(folder))
    _, errors = refused.communicate(timeout=280)
    assert refused.returncode == 2 and "of free space, the cache takes about" in " ".join(errors.split())
    (own_disk / "filler").unlink()
    finish(start(preset, "--resume", str(folder)))
    assert_same(folder, expected)
