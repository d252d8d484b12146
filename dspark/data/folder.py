"""A folder of files on a local disk, or wherever pyarrow or fsspec can reach (`s3://`, `gs://`, `hdfs://`, ...).

A file appears whole or not at all: a local one is written beside under a temporary name, synced and renamed; an object
elsewhere is there once its upload is closed.
"""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
from numpy.typing import NDArray
from zlib_ng.zlib_ng import crc32

from dspark.errors import InputError

_PARTIAL = ".partial"


class Sink:
    """What is being written: passes bytes on and keeps their number and CRC-32. Usable as a Python file."""

    def __init__(self, stream: IO[bytes] | pa.NativeFile) -> None:
        self._stream = stream
        self.size = 0
        self.crc32 = 0
        self.closed = False
        self.failed: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes a buffer. After a failure it takes everything and keeps nothing, so that a writer can be closed."""
        size = memoryview(data).nbytes
        if self.failed is None:
            try:
                self._stream.write(data)
            except OSError as error:
                self.failed = error
                raise
            self.crc32 = crc32(data, self.crc32)
            self.size += size
        return size

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Nothing: whoever made the sink flushes once, at the end."""

    def close(self) -> None:
        self.closed = True


class Source:
    """A file to read pieces of. Never through a memory map: pages of a map count as the process's memory."""

    def __init__(self, file: int | pa.NativeFile) -> None:
        self._file = file  # a descriptor, its own from now on
        self.size: int = os.fstat(file).st_size if isinstance(file, int) else file.size()

    def read_into(self, at: int, out: NDArray[np.uint8]) -> int:
        """Fills `out` from place `at` on; returns how many bytes there were. Raises OSError."""
        done = 0
        while done < len(out):
            rest = out[done:]
            if isinstance(self._file, int):
                got = os.preadv(self._file, [rest.data], at + done)
            else:
                self._file.seek(at + done)
                got = self._file.readinto(rest)
            if got == 0:
                break
            done += got
        return done

    def will_read(self, at: int, size: int) -> None:
        """Lets a local disk begin with a piece that is read soon."""
        if isinstance(self._file, int):
            os.posix_fadvise(self._file, at, size, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        if not isinstance(self._file, int):
            self._file.close()
        elif self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()


class Folder:
    """`address` is a path, or a URI of any scheme that pyarrow or fsspec knows."""

    def __init__(self, address: str | os.PathLike[str]) -> None:
        text = os.fspath(address)
        self._files, self._path = _file_system(text)
        self.local = Path(self._path) if isinstance(self._files, pafs.LocalFileSystem) else None
        self.address = text.rstrip("/") if "://" in text and self.local is None else self._path

    def where(self, name: str) -> str:
        """The address of a file in the folder, for messages."""
        return f"{self.address}/{name}"

    def free_bytes(self) -> int | None:
        """Free space of a local disk, where the folder is or will be; None elsewhere."""
        if self.local is None:
            return None
        return shutil.disk_usage(_standing(self.local)).free

    def shares_disk(self, other: Path) -> bool:
        """Whether the folder is or will be on the local disk of an absolute path."""
        return self.local is not None and _standing(self.local).stat().st_dev == _standing(other).stat().st_dev

    def sizes(self) -> dict[str, int]:
        """Bytes of every file by name, temporary ones left out; empty where there is no such folder."""
        return {name: size for name, size in self._listed().items() if not name.endswith(_PARTIAL)}

    def make(self) -> None:
        """Creates the folder and those above it."""
        try:
            self._files.create_dir(self._path, recursive=True)
        except OSError as error:
            raise InputError(f"the folder {self.address} cannot be made ({_reason(error)}): name another") from error

    def open(self, name: str) -> pa.NativeFile:
        """A file to be read from its beginning.

        Raises:
            InputError: the file is missing or cannot be read.
        """
        try:
            return self._files.open_input_file(f"{self._path}/{name}")
        except OSError as error:
            raise InputError(f"{self.where(name)} cannot be read: {_reason(error)}") from error

    def source(self, name: str) -> Source:
        """A file to be read in pieces; errors as in `open`."""
        if self.local is None:
            return Source(self.open(name))
        try:
            return Source(os.open(self.local / name, os.O_RDONLY))
        except OSError as error:
            raise InputError(f"{self.where(name)} cannot be read: {_reason(error)}") from error

    def read(self, name: str) -> bytes:
        """The whole of a small file."""
        with self.open(name) as file:
            data: bytes = file.read()
        return data

    @contextmanager
    def create(self, name: str) -> Iterator[Sink]:
        """A new file, or another content for one; on any error nothing of it stays.

        Raises:
            InputError: the disk is full or refuses.
        """
        sink: Sink | None = None
        other: OSError | None = None
        try:
            with self._local(name) if self.local is not None else self._remote(name) as sink:
                try:
                    yield sink
                except OSError as error:
                    # What is written may come from files, too.
                    other = error if sink.failed is None else None
                    raise
        except OSError as error:
            if error is other:
                raise
            raise InputError(
                f"{self.where(name)} cannot be written, after {sink.size if sink else 0:,} bytes: {_reason(error)}. "
                "Free space or write elsewhere; finished files stay"
            ) from error

    def write(self, name: str, data: bytes) -> None:
        """A new file with this content."""
        with self.create(name) as sink:
            sink.write(data)

    def remove(self, name: str) -> None:
        """Deletes a file; one that is missing is no error."""
        with suppress(FileNotFoundError):
            self._files.delete_file(f"{self._path}/{name}")

    def folders(self) -> list[str]:
        """Names of the folders in this one, in order."""
        found = self._files.get_file_info(pafs.FileSelector(self._path, allow_not_found=True))
        return sorted(info.base_name for info in found if info.type == pafs.FileType.Directory)

    def remove_folder(self, name: str) -> None:
        """Deletes a folder in this one with all that it holds."""
        self._files.delete_dir(f"{self._path}/{name}")

    def remove_partial(self) -> None:
        """Deletes what a killed writer left half written."""
        for name in self._listed():
            if name.endswith(_PARTIAL):
                self.remove(name)

    def _listed(self) -> dict[str, int]:
        try:
            found = self._files.get_file_info(pafs.FileSelector(self._path, allow_not_found=True))
        except OSError as error:
            raise InputError(f"the folder {self.address} cannot be listed: {_reason(error)}") from error
        return {info.base_name: info.size for info in found if info.is_file}

    @contextmanager
    def _local(self, name: str) -> Iterator[Sink]:
        assert self.local is not None
        # A name of its own: another process may be writing the same file at this moment.
        partial = self.local / f".{name}.{uuid.uuid4().hex[:8]}{_PARTIAL}"
        try:
            with partial.open("wb") as file:
                yield Sink(file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.local / name)
            _sync_folder(self.local)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    @contextmanager
    def _remote(self, name: str) -> Iterator[Sink]:
        try:
            with self._files.open_output_stream(f"{self._path}/{name}") as stream:
                yield Sink(stream)
        except BaseException:
            # Closing the stream has published what there was.
            with suppress(OSError):
                self.remove(name)
            raise


def _file_system(address: str) -> tuple[pafs.FileSystem, str]:
    """The file system of an address and the path in it, without a slash at its end."""
    if "://" not in address:
        return pafs.LocalFileSystem(), os.path.abspath(os.path.expanduser(address))
    try:
        files, path = pafs.FileSystem.from_uri(address)
    except pa.ArrowInvalid:
        files, path = _through_fsspec(address)
    except OSError as error:
        raise InputError(f"{address} cannot be reached: {_reason(error)}") from error
    return files, path.rstrip("/")


def _through_fsspec(address: str) -> tuple[pafs.FileSystem, str]:
    import fsspec

    try:
        files, path = fsspec.core.url_to_fs(address)
    except (ValueError, ImportError) as error:
        raise InputError(f"{address} is on no file system that pyarrow or fsspec knows: {error}") from error
    return pafs.PyFileSystem(pafs.FSSpecHandler(files)), path


def _standing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(one for one in (path, *path.parents) if one.exists())


def _sync_folder(path: Path) -> None:
    """A rename is on the disk once its folder is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: OSError) -> str:
    return error.strerror or (str(error).splitlines() or [type(error).__name__])[0]
