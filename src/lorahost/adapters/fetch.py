"""Where adapters come from: local directories and archives, and S3."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from lorahost.adapters import s3
from lorahost.adapters.archive import is_archive, unpack
from lorahost.adapters.source_files import Budget, SourceLimits, find_root, is_wanted
from lorahost.errors import AdapterRejectedError, InvalidRequestError

FORMS = (
    "an absolute local directory, a local .tar.gz, .tgz or .tar (both also as file:///…), "
    "s3://bucket/prefix/ or s3://bucket/key.tar.gz"
)


@dataclass(frozen=True)
class SourceFetcher:
    """Turns a `src` into a local directory with an adapter.

    A local directory is returned as it is: the importer copies what it needs and nothing reads it afterwards,
    since its owner may change or delete it at any time. Everything else is written below `into`.

    Attributes:
        roots: Local sources must lie under one of these; empty allows all.
        limits: Size and number of files.
        s3: How S3 is reached.
    """

    roots: Sequence[Path] = ()
    limits: SourceLimits = field(default_factory=SourceLimits)
    s3: s3.S3Settings = field(default_factory=s3.S3Settings)

    def fetch(self, src: str, into: Path) -> Path:
        """Returns the directory that holds `adapter_config.json`; blocking.

        Raises:
            InvalidRequestError: `src` is of no accepted form, or outside of `roots`.
            AdapterRejectedError: it can't be had, is too large, or holds no adapter.
        """
        into.mkdir(parents=True, exist_ok=True)
        if src.startswith("s3://"):
            return self._fetch_s3(src, into)
        path = self._local_path(src)
        try:
            if path.is_dir():
                return self._directory(src, path)
            if is_archive(path.name):
                return self._archive(path, into / "unpacked", src)
        except PermissionError as error:
            raise _unreadable(src, error) from error
        raise _bad_form(src, "it is a file, but no archive")

    def _fetch_s3(self, src: str, into: Path) -> Path:
        bucket, key = _bucket_and_key(src)
        store = s3.S3Store(self.s3)
        if is_archive(key):
            archive = store.download(bucket, key, into / "download", self.limits)
            try:
                return self._archive(archive, into / "unpacked", src)
            finally:
                archive.unlink()
        skipped = store.download_prefix(bucket, key, into / "objects", self.limits)
        return find_root(into / "objects", src, skipped)

    def _archive(self, archive: Path, into: Path, src: str) -> Path:
        unpacked = unpack(archive, into, self.limits, src)
        return find_root(into, src, unpacked.skipped)

    def _local_path(self, src: str) -> Path:
        text = _file_url_path(src) if src.startswith("file:") else src
        if "\0" in text or "://" in text or not text.startswith("/"):
            raise _bad_form(src)
        if ".." in PurePosixPath(text).parts:
            raise _bad_form(src, "it contains '..'")
        path = Path(os.path.realpath(text))
        if self.roots and not any(path.is_relative_to(os.path.realpath(root)) for root in self.roots):
            raise InvalidRequestError(
                f"src {src!r} lies outside the allowed directories {[str(root) for root in self.roots]}",
                code="source_not_allowed",
                param="src",
            )
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise AdapterRejectedError(
                f"src {src!r} does not exist on this host", code="artifact_missing", param="src"
            ) from error
        except OSError as error:
            raise _unreadable(src, error) from error
        return path

    def _directory(self, src: str, path: Path) -> Path:
        root = find_root(path, src)
        budget = Budget(self.limits, src)
        for child in sorted(root.iterdir()):
            if is_wanted(PurePosixPath(child.name)) and not child.is_dir():
                self._check_link(src, path, child)
                budget.add(child.stat().st_size)
        return root

    def _check_link(self, src: str, directory: Path, file: Path) -> None:
        real = Path(os.path.realpath(file))
        allowed = [directory, *(Path(os.path.realpath(root)) for root in self.roots)]
        if not any(real.is_relative_to(root) for root in allowed):
            raise AdapterRejectedError(
                f"src {src!r}: {file.name} is a link to {str(real)!r}, outside {[str(a) for a in allowed]}",
                code="link_outside_source",
                param="src",
            )


def _file_url_path(src: str) -> str:
    url = urlsplit(src)
    if url.netloc not in ("", "localhost") or url.query or url.fragment:
        raise _bad_form(src)
    return unquote(url.path)


def _bucket_and_key(src: str) -> tuple[str, str]:
    bucket, _, key = src.removeprefix("s3://").partition("/")
    if not bucket or not key.strip("/") or any(part in ("", ".", "..") for part in key.rstrip("/").split("/")):
        raise _bad_form(src)
    if not is_archive(key) and not key.endswith("/"):
        key += "/"
    return bucket, key


def _bad_form(src: str, why: str = "") -> InvalidRequestError:
    return InvalidRequestError(
        f"src {src[:500]!r} is not accepted{': ' + why if why else ''}; it must be {FORMS}",
        code="bad_source",
        param="src",
    )


def _unreadable(src: str, error: OSError) -> AdapterRejectedError:
    return AdapterRejectedError(
        f"src {src!r} can't be read: {error.strerror or error}", code="artifact_unreadable", param="src"
    )
