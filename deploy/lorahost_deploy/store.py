"""The S3 prefix that holds models and adapters, each below its digest."""

from __future__ import annotations

import hashlib
from pathlib import Path

from lorahost_deploy import console
from lorahost_deploy.aws import Aws
from lorahost_deploy.errors import DeployError
from lorahost_deploy.plan import Plan, S3Place

BLOCK = 1 << 20
BATCH = 1000


def model_url(aws: Aws, plan: Plan) -> str:
    """Where SageMaker finds the base model; a local directory is uploaded, files that are there already are not.

    Raises:
        DeployError: the directory holds no model.
    """
    if plan.model.startswith("s3://"):
        return plan.model.rstrip("/") + "/"
    folder = Path(plan.model)
    if not (folder / "config.json").is_file():
        raise DeployError(f"--model {folder}: no config.json in it")
    plan.need("store")
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.relative_to(folder).parts[0].startswith("."))
    place = S3Place.parse(plan.store)
    root = ("models", _digest(folder, files))
    for path in files:
        key = place.key(*root, path.relative_to(folder).as_posix())
        there = aws.find("s3", "HeadObject", Bucket=place.bucket, Key=key)
        if there is None or there["ContentLength"] != path.stat().st_size:
            aws.upload(path, place.bucket, key, f"model {path.name}")
    return place.url(*root) + "/"


def _digest(folder: Path, files: list[Path]) -> str:
    console.say(f"model {folder}: {len(files)} files, {sum(p.stat().st_size for p in files) / 1e9:.2f} GB")
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
    return digest.hexdigest()[:16]


def clear(aws: Aws, store: str) -> None:
    """Deletes all that uploads have put below the store's prefix: its models and adapters."""
    place = S3Place.parse(store)
    for part in ("models", "adapters"):
        found = aws.pages("s3", "ListObjectsV2", "Contents", Bucket=place.bucket, Prefix=place.key(part) + "/")
        keys = [item["Key"] for item in found]
        for i in range(0, len(keys), BATCH):
            objects = [{"Key": key} for key in keys[i : i + BATCH]]
            aws.remove("s3", "DeleteObjects", Bucket=place.bucket, Delete={"Objects": objects, "Quiet": True})
        if keys:
            console.say(f"{place.url(part)}: {len(keys)} objects deleted")
