"""Safe unpacking of a tar or tar.gz whose author is not trusted."""

from __future__ import annotations

import gzip
import os
import tarfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO

from lorahost.adapters.source_files import Budget, SourceLimits, is_wanted, too_large
from lorahost.errors import AdapterRejectedError

SUFFIXES = (".tar.gz", ".tgz", ".tar")
GZIP_MAGIC = b"\x1f\x8b"
BLOCK = tarfile.BLOCKSIZE
COPY_BYTES = 1 << 20
# A header that asks for more in one read (a long name, PAX records) is an attack on memory.
MAX_READ = 1 << 20
# Headers and padding come on top of the files' own bytes.
OVERHEAD_BYTES = 64 << 20
_BROKEN = (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, ValueError, OverflowError)


@dataclass(slots=True)
class Unpacked:
    """What came out: relative paths written, their bytes, and the names left out."""

    files: list[str] = field(default_factory=list)
    bytes: int = 0
    skipped: list[str] = field(default_factory=list)


class _Forward:
    """A file for tarfile: forward only, in bounded reads, up to a total; it remembers its last block."""

    def __init__(self, raw: IO[bytes] | gzip.GzipFile, source: str, limit: int) -> None:
        self._raw = raw
        self._source = source
        self._limit = limit
        self._position = 0
        self.last = b""

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_READ:
            raise tarfile.ReadError(f"a header asks for {size} bytes")
        data = self._raw.read(size)
        self._position += len(data)
        if self._position > self._limit:
            raise too_large(self._source, f"at least {self._position} bytes", f"{self._limit} bytes")
        self.last = data
        return data

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET or position < self._position:
            raise tarfile.ReadError("a header points backwards")
        while self._position < position:
            if not self.read(min(position - self._position, COPY_BYTES)):
                raise EOFError("unexpected end of data")
        return self._position

    def drain(self) -> None:
        """Reads to the end: only there a gzip stream is checked against its checksum."""
        while self.read(COPY_BYTES):
            pass


def is_archive(name: str) -> bool:
    """Whether a file of this name is taken for an archive."""
    return name.lower().endswith(SUFFIXES)


def unpack(archive: Path, into: Path, limits: SourceLimits, source: str) -> Unpacked:
    """Writes the wanted files of `archive` into the new directory `into`, as plain files.

    Args:
        source: What the caller asked for, for messages.

    Raises:
        AdapterRejectedError: `bad_archive`, `unsafe_archive` or `artifact_too_large`.
    """
    into.mkdir(parents=True)
    with archive.open("rb") as packed:
        zipped = packed.read(2) == GZIP_MAGIC
        packed.seek(0)
        try:
            raw: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=packed) if zipped else packed
            return _unpack(_Forward(raw, source, limits.max_bytes + OVERHEAD_BYTES), into, limits, source)
        except _BROKEN as error:
            raise AdapterRejectedError(
                f"src {source!r} is no complete tar or tar.gz: {error or type(error).__name__}",
                code="bad_archive",
                param="src",
            ) from error


def _unpack(stream: _Forward, into: Path, limits: SourceLimits, source: str) -> Unpacked:
    unpacked = Unpacked()
    budget = Budget(limits, source)
    with tarfile.open(fileobj=stream, mode="r:") as tar:  # type: ignore[call-overload]
        for member in tar:
            budget.add(member.size if member.isfile() else 0)
            path = _safe_path(member, source)
            if member.isdir():
                continue
            if not is_wanted(path):
                unpacked.skipped.append(path.name)
                continue
            if str(path) in unpacked.files:
                raise _unsafe(source, member, "appears twice")
            _copy(tar, member, into / path)
            unpacked.files.append(str(path))
            unpacked.bytes += member.size
    # tarfile ends quietly at a damaged header; a whole archive ends with a block of zeros.
    if stream.last != bytes(BLOCK):
        raise tarfile.ReadError("it ends without an end-of-archive block")
    stream.drain()
    return unpacked


def _safe_path(member: tarfile.TarInfo, source: str) -> PurePosixPath:
    if not (member.isdir() or member.type in (tarfile.REGTYPE, tarfile.AREGTYPE)) or member.issparse():
        raise _unsafe(source, member, "is a link, a device or sparse")
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\\" in member.name or "\0" in member.name:
        raise _unsafe(source, member, "is absolute or leaves the archive")
    return path


def _unsafe(source: str, member: tarfile.TarInfo, what: str) -> AdapterRejectedError:
    return AdapterRejectedError(
        f"src {source!r}: member {member.name[:200]!r} {what}", code="unsafe_archive", param="src"
    )


def _copy(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    data = tar.extractfile(member)
    if data is None:
        raise tarfile.ReadError(f"member {member.name[:200]!r} has no data")
    target.parent.mkdir(parents=True, exist_ok=True)
    with data, target.open("xb") as file:
        left = member.size
        while left:
            chunk = data.read(min(left, COPY_BYTES))
            if not chunk:
                raise EOFError(f"member {member.name[:200]!r} is cut short")
            file.write(chunk)
            left -= len(chunk)
