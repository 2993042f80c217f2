"""Waiting for AWS, and what is said when it fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lorahost_deploy import console
from lorahost_deploy.aws import Aws
from lorahost_deploy.errors import DeployError

LOG_LINES = 10
MOVING = frozenset({"Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting"})
Look = Callable[[], dict[str, Any] | None]


def endpoint_logs(endpoint: str) -> str:
    """Log group of an endpoint's instances."""
    return f"/aws/sagemaker/Endpoints/{endpoint}"


def component_logs(base: str) -> str:
    """Log group of a base inference component's containers; its adapters' lines are there, too."""
    return f"/aws/sagemaker/InferenceComponents/{base}"


def settled(aws: Aws, look: Look, status: str, what: str, timeout_s: float) -> dict[str, Any] | None:
    """Waits until `look` finds nothing, or something whose field `status` changes no more by itself; returns it.

    Raises:
        DeployError: it takes longer than `timeout_s`.
    """
    began = time.monotonic()
    with console.waiting(what) as show:
        while True:
            found = look()
            if found is None or found[status] not in MOVING:
                return found
            if time.monotonic() - began > timeout_s:
                raise DeployError(
                    f"{what} is {found[status]} after {timeout_s:.0f} s; run the same command again to wait on"
                )
            show(found[status])
            aws.sleep()


def in_service(
    aws: Aws, look: Look, status: str, what: str, log_group: str, timeout_s: float = 7200.0
) -> dict[str, Any]:
    """Waits until what was created or updated is InService.

    Raises:
        DeployError: it failed or vanished; with SageMaker's reason, the log group and its last lines.
    """
    if aws.dry_run:
        return {}
    found = settled(aws, look, status, what, timeout_s)
    if found is not None and found[status] == "InService":
        console.say(f"{what}: InService")
        return found
    state = "gone" if found is None else found[status]
    reason = (found or {}).get("FailureReason") or "SageMaker gave no reason"
    raise DeployError(f"{what} is {state}: {reason}\nlog group: {log_group}{_tail(aws, log_group)}")


def gone(aws: Aws, look: Look, status: str, what: str, timeout_s: float = 3600.0) -> None:
    """Waits until what was deleted is gone.

    Raises:
        DeployError: the deletion failed.
    """
    if aws.dry_run:
        return
    found = settled(aws, look, status, what, timeout_s)
    if found is not None:
        reason = found.get("FailureReason") or "SageMaker gave no reason"
        raise DeployError(f"{what} could not be deleted, it is {found[status]}: {reason}")
    console.say(f"{what}: deleted")


def _tail(aws: Aws, group: str) -> str:
    """The last lines of a log group; says so when they can't be read."""
    try:
        newest = {"orderBy": "LastEventTime", "descending": True, "limit": 1}
        streams = aws.find("logs", "DescribeLogStreams", logGroupName=group, **newest) or {}
        names = [stream["logStreamName"] for stream in streams.get("logStreams", [])]
        if not names:
            return " (it has no lines)"
        where = {"logGroupName": group, "logStreamName": names[0]}
        answer = aws.find("logs", "GetLogEvents", **where, startFromHead=False, limit=LOG_LINES) or {}
    except DeployError as error:
        return f"\n  (its lines can't be read: {error.message.splitlines()[0]})"
    lines = [line for event in answer.get("events", []) for line in event["message"].splitlines()]
    return "".join(f"\n  {line[:300]}" for line in lines[-LOG_LINES:])
