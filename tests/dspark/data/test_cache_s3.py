"""Caches on an object store that is spoken to over the network; skipped where `moto[server]` is not installed."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from dspark.data.cache import CacheWriter
from dspark.data.cache_check import verify
from dspark.data.cache_reader import CacheReader
from dspark.data.codecs import Codec
from dspark.data.folder import Folder
from dspark.data.shards import write_shard
from dspark.errors import InputError
from tests.dspark.caches import PLAIN, SHARDS, name, origin_for, planned, table, write_cache

server = pytest.importorskip("moto.server", reason="an S3 server comes with `pip install 'moto[server]'`")
ALL = [number for shard in SHARDS for number in shard]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty bucket of a server on this machine, found like any other: through the environment."""
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    for key, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(key, value)
    here = pafs.S3FileSystem(endpoint_override=f"{host}:{port}", scheme="http", allow_bucket_creation=True)
    here.create_dir("caches")
    yield "s3://caches"
    running.stop()


@pytest.mark.parametrize("codec", [PLAIN, Codec(storage="planes")])
def test_a_cache_on_an_object_store_is_that_of_a_disk(bucket: str, codec: Codec) -> None:
    address = f"{bucket}/{codec.storage}"
    write_cache(address, codec)
    reader = CacheReader(address)
    assert reader.table([name(number) for number in ALL]).equals(table(ALL), check_metadata=True)
    assert verify(Folder(address), 2, lambda _: None) == []


def test_a_writer_goes_on_and_leaves_no_half_object(bucket: str, tmp_path: Path) -> None:
    def writer() -> CacheWriter:
        return CacheWriter(f"{bucket}/two", origin_for(), PLAIN, planned(), {})

    with writer() as begun:
        write_shard(begun.task, 1, planned()[1], [table(SHARDS[1])])
        with pytest.raises(InputError, match=r"lacks taps \[-1, 5\]"):
            write_shard(begun.task, 0, planned()[0], [table([0]), table([1], taps=(2,))])
        assert begun.unfinished() == [0, 2]
        assert "shard-000000.parquet" not in Folder(f"{bucket}/two").sizes()
    with writer() as resumed:
        for index in resumed.unfinished():
            write_shard(resumed.task, index, planned()[index], [table(SHARDS[index])])
        resumed.finish()
    files, path = pafs.FileSystem.from_uri(f"{bucket}/two/shard-000001.parquet")
    with files.open_input_file(path) as stream:
        data = bytearray(stream.read())
    data[len(data) // 2] ^= 1
    with files.open_output_stream(path) as stream:
        stream.write(bytes(data))
    (fault,) = verify(Folder(f"{bucket}/two"), 1, lambda _: None)
    assert "shard-000001.parquet" in str(fault)
