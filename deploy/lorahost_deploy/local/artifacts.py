"""What comes out of S3 for containers, and what goes to CloudWatch from them."""

from __future__ import annotations

import hashlib
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lorahost_deploy.local.state import Json, World
from lorahost_deploy.waiting import component_logs


class ArtifactError(Exception):
    """Something in S3 that is not there, or no archive."""


def unpack(world: World, url: str, into: Path) -> None:
    """Fetches a tar.gz and unpacks it into the new directory `into`, all or nothing.

    Raises:
        ArtifactError: it can't be had, or is no tar.gz.
    """
    place = urlsplit(url)
    with tempfile.TemporaryDirectory(dir=into.parent, prefix="fetch-") as scratch:
        packed = Path(scratch) / "artifact.tar.gz"
        _download(world, place.netloc, place.path.lstrip("/"), packed, url)
        unpacked = Path(scratch) / "unpacked"
        try:
            with tarfile.open(packed, "r:gz") as tar:
                tar.extractall(unpacked, filter="data")
        except (tarfile.TarError, OSError, EOFError) as error:
            raise ArtifactError(f"Could not unpack the artifact at {url}: {error}") from error
        unpacked.rename(into)


def model_directory(world: World, container: Json) -> Path | None:
    """The model's files on this machine; None when the container names none.

    Raises:
        ArtifactError: they can't be had.
    """
    url = container.get("ModelDataSource", {}).get("S3DataSource", {}).get("S3Uri")
    if url is None:
        return None
    folder = world.work_dir / "models" / hashlib.sha256(url.encode()).hexdigest()[:16]
    if folder.is_dir():
        return folder
    place = urlsplit(url)
    prefix = place.path.lstrip("/")
    s3 = world.aws("s3")
    partial = Path(tempfile.mkdtemp(dir=world.work_dir, prefix="model-"))
    for listed in s3.get_paginator("list_objects_v2").paginate(Bucket=place.netloc, Prefix=prefix):
        for item in listed.get("Contents", []):
            target = partial / item["Key"].removeprefix(prefix)
            target.parent.mkdir(parents=True, exist_ok=True)
            _download(world, place.netloc, item["Key"], target, url)
    folder.parent.mkdir(exist_ok=True)
    partial.rename(folder)
    return folder


def _download(world: World, bucket: str, key: str, target: Path, url: str) -> None:
    from botocore.exceptions import ClientError

    try:
        world.aws("s3").download_file(bucket, key, str(target))
    except ClientError as error:
        raise ArtifactError(f"Could not access the artifact at {url}: {error}") from error


def publish_log(world: World, base: str, text: str) -> None:
    """Puts a container's last lines into its log group."""
    lines = [line for line in text.splitlines() if line.strip()][-100:]
    if not lines:
        return
    logs, group, stream = world.aws("logs"), component_logs(base), "AllTraffic/local"
    for create, names in (
        (logs.create_log_group, {"logGroupName": group}),
        (logs.create_log_stream, {"logGroupName": group, "logStreamName": stream}),
    ):
        _unless_there(logs, create, names)
    now = int(time.time() * 1000)
    events = [{"timestamp": now, "message": line} for line in lines]
    logs.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)


def _unless_there(logs: Any, create: Any, names: dict[str, str]) -> None:
    try:
        create(**names)
    except logs.exceptions.ResourceAlreadyExistsException:
        return
