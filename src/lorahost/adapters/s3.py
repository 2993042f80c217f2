"""Adapters from S3 through boto3, which is imported on first use: the server also runs without it."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from lorahost.adapters.source_files import Budget, SourceLimits, is_wanted
from lorahost.errors import AdapterRejectedError

DENIED = {"403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "Forbidden"}
MISSING = {"404", "NoSuchKey", "NoSuchBucket", "NotFound"}
CHANGED = {"412", "PreconditionFailed"}
HASH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class S3Settings:
    """How S3 is reached; credentials and region come from boto3's own chain.

    Attributes:
        endpoint_url: Another endpoint; empty leaves it to boto3 (`AWS_ENDPOINT_URL_S3` and the like).
        connect_timeout_s, read_timeout_s: For one connection.
        attempts: For one request.
        threads: Parallel parts of one object.
        part_bytes: Size of a part, and of the smallest object that is split.
    """

    endpoint_url: str = ""
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 60.0
    attempts: int = 4
    threads: int = 16
    part_bytes: int = 16 << 20


@dataclass(frozen=True, slots=True)
class _Object:
    bucket: str
    key: str
    size: int
    etag: str


class S3Store:
    """One client; make one for each fetch, since boto3 sessions don't go between threads.

    Raises:
        AdapterRejectedError: `s3_unavailable`: boto3 is not installed.
    """

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        try:
            boto3: Any = importlib.import_module("boto3")
            self._transfer: Any = importlib.import_module("boto3.s3.transfer")
            self._errors: Any = importlib.import_module("botocore.exceptions")
            self._boto3_errors: Any = importlib.import_module("boto3.exceptions")
            self._transfer_errors: Any = importlib.import_module("s3transfer.exceptions")
            config: Any = importlib.import_module("botocore.config")
        except ImportError as error:
            raise AdapterRejectedError(
                "src is in S3, but boto3 is not installed here; `pip install boto3`",
                code="s3_unavailable",
                param="src",
            ) from error
        # Private stores rarely have a host name for each bucket.
        own = settings.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        with self._translated("", ""):
            self._client: Any = boto3.session.Session().client(
                "s3",
                endpoint_url=settings.endpoint_url or None,
                config=config.Config(
                    connect_timeout=settings.connect_timeout_s,
                    read_timeout=settings.read_timeout_s,
                    retries={"mode": "standard", "total_max_attempts": settings.attempts},
                    max_pool_connections=settings.threads + 2,
                    s3={"addressing_style": "path" if own else "auto"},
                ),
            )

    def download(self, bucket: str, key: str, into: Path, limits: SourceLimits) -> Path:
        """Downloads one object into `into` under its own base name; its size is checked first.

        Raises:
            AdapterRejectedError: `artifact_missing`, `artifact_access_denied`, `artifact_unavailable`,
                `artifact_too_large`, `source_changed` or `artifact_corrupt`.
        """
        found = self._head(bucket, key)
        Budget(limits, f"s3://{bucket}/{key}").add(found.size)
        return self._get(found, into / PurePosixPath(key).name)

    def download_prefix(self, bucket: str, prefix: str, into: Path, limits: SourceLimits) -> list[str]:
        """Downloads the wanted objects under `prefix`, keeping their paths; returns the names left out.

        All sizes are checked before the first byte is fetched. Raises as `download` does.
        """
        objects, skipped = self._list(bucket, prefix, limits)
        into.mkdir(parents=True)
        for found in objects:
            self._get(found, into / found.key.removeprefix(prefix))
        return skipped

    def _list(self, bucket: str, prefix: str, limits: SourceLimits) -> tuple[list[_Object], list[str]]:
        objects: list[_Object] = []
        skipped: list[str] = []
        budget = Budget(limits, f"s3://{bucket}/{prefix}")
        with self._translated(bucket, prefix):
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
                for item in page.get("Contents", []):
                    relative = item["Key"].removeprefix(prefix)
                    wanted = _is_plain(relative) and is_wanted(PurePosixPath(relative))
                    budget.add(item["Size"] if wanted else 0)
                    if wanted:
                        objects.append(_Object(bucket, item["Key"], item["Size"], item["ETag"]))
                    elif relative and not relative.endswith("/"):
                        skipped.append(PurePosixPath(relative).name)
        if not objects:
            raise AdapterRejectedError(
                f"no adapter files under prefix {prefix!r} in bucket {bucket!r}",
                code="artifact_missing",
                param="src",
            )
        return objects, skipped

    def _head(self, bucket: str, key: str) -> _Object:
        with self._translated(bucket, key):
            head = self._client.head_object(Bucket=bucket, Key=key)
        return _Object(bucket, key, head["ContentLength"], head["ETag"])

    def _get(self, found: _Object, target: Path) -> Path:
        """Downloads next to `target` and renames when everything is right: no half file under its name."""
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        settings = self._settings
        config = self._transfer.TransferConfig(
            multipart_threshold=settings.part_bytes,
            multipart_chunksize=settings.part_bytes,
            max_concurrency=settings.threads,
            preferred_transfer_client="classic",
        )
        with self._translated(found.bucket, found.key):
            self._client.download_file(found.bucket, found.key, str(partial), Config=config)
            head = self._client.head_object(Bucket=found.bucket, Key=found.key)
        self._verify(found, head, partial)
        partial.replace(target)
        return target

    def _verify(self, found: _Object, head: dict[str, Any], file: Path) -> None:
        where = f"key {found.key!r} in bucket {found.bucket!r}"
        size = file.stat().st_size
        if head["ETag"] != found.etag:
            raise AdapterRejectedError(
                f"{where} changed while downloading (ETag {found.etag} -> {head['ETag']}); register again",
                code="source_changed",
                param="src",
            )
        digest = found.etag.strip('"')
        # The ETag is an MD5 only for objects in one part, and not under KMS or customer keys.
        plain = len(digest) == 32 and head.get("ServerSideEncryption") in (None, "AES256")
        if size != found.size or (plain and "SSECustomerAlgorithm" not in head and _md5(file) != digest):
            raise AdapterRejectedError(
                f"{where} arrived damaged: {size} bytes of {found.size}, ETag {found.etag}",
                code="artifact_corrupt",
                param="src",
            )

    @contextmanager
    def _translated(self, bucket: str, key: str) -> Iterator[None]:
        """Turns what boto3 raises into errors that name bucket and key."""
        where = f"key {key!r} in bucket {bucket!r}" if bucket else "the S3 client"
        try:
            yield
        except self._errors.ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            raise _client_error(code, where, str(error)) from error
        except self._errors.NoCredentialsError as error:
            raise _refused("artifact_access_denied", where, f"no AWS credentials ({error})") from error
        except self._transfer_errors.S3DownloadFailedError as error:
            raise _refused("source_changed", where, f"it changed while downloading ({error})") from error
        except (self._errors.BotoCoreError, self._boto3_errors.Boto3Error, ValueError) as error:
            raise _refused("artifact_unavailable", where, str(error)) from error


def _client_error(code: str, where: str, text: str) -> AdapterRejectedError:
    if code in MISSING:
        return _refused("artifact_missing", where, f"it does not exist ({text})")
    if code in DENIED:
        return _refused("artifact_access_denied", where, f"access is denied ({text})")
    if code in CHANGED:
        return _refused("source_changed", where, f"it changed while downloading ({text})")
    return _refused("artifact_unavailable", where, text)


def _refused(code: str, where: str, why: str) -> AdapterRejectedError:
    return AdapterRejectedError(f"{where}: {why}", code=code, param="src")


def _is_plain(relative: str) -> bool:
    parts = relative.split("/")
    return "\\" not in relative and "\0" not in relative and not any(p in ("", ".", "..") for p in parts)


def _md5(file: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with file.open("rb") as data:
        while chunk := data.read(HASH_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
