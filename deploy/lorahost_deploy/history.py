"""Which versions an adapter had: a small JSON object beside its archives, oldest first.

The live version is what SageMaker describes. What comes before it in the list is what a rollback goes back to.
"""

from __future__ import annotations

import json

from lorahost_deploy.aws import Aws
from lorahost_deploy.plan import S3Place

KEPT = 20


def _key(place: S3Place, name: str) -> str:
    return place.key("adapters", name, "history.json")


def read(aws: Aws, place: S3Place, name: str) -> list[str]:
    """The archives' addresses, oldest first."""
    answer = aws.find("s3", "GetObject", Bucket=place.bucket, Key=_key(place, name))
    return [] if answer is None else [str(url) for url in json.loads(answer["Body"].read())["versions"]]


def record(aws: Aws, place: S3Place, name: str, before: str, now: str, *, fresh: bool) -> None:
    """Notes that `now` is live after `before` (empty: none). What a rollback went back from is forgotten.

    Args:
        fresh: The adapter is new: what an earlier one of its name had does not count.
    """
    versions = read(aws, place, name)
    wanted = [] if fresh else list(versions)
    if before and before != now:
        wanted = [*wanted[: wanted.index(before) + 1], now] if before in wanted else [*wanted, before, now]
    elif now not in wanted:
        wanted.append(now)
    wanted = wanted[-KEPT:]
    if wanted != versions:
        body = json.dumps({"versions": wanted}, indent=2).encode()
        shown = body.decode() if aws.dry_run else body
        aws.change("s3", "PutObject", {"Bucket": place.bucket, "Key": _key(place, name), "Body": shown})


def before(versions: list[str], live: str) -> str | None:
    """The version to go back to: the one before `live`, or the last good one when `live` never worked."""
    if live not in versions:
        return versions[-1] if versions else None
    at = versions.index(live)
    return versions[at - 1] if at else None


def forget(aws: Aws, place: S3Place, name: str) -> None:
    """Removes the history of an adapter that is gone; its archives stay."""
    if read(aws, place, name):
        aws.remove("s3", "DeleteObject", Bucket=place.bucket, Key=_key(place, name))
