"""The IAM policies in `deploy/policies`, filled in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from string import Template
from typing import Any

from lorahost_deploy.aws import Aws
from lorahost_deploy.errors import DeployError
from lorahost_deploy.plan import S3Place

HERE = Path(__file__).resolve().parent
# beside the package in the wheel, one level up in the repository
FOLDER = HERE / "policy_files" if (HERE / "policy_files").is_dir() else HERE.parent / "policies"
EXECUTION_ROLE = "lorahost-execution"
BUILD_ROLE = "lorahost-build"
BEDROCK_ROLE = "lorahost-bedrock"
REPOSITORY = "lorahost"
PROJECT = "lorahost-image"


def names() -> list[str]:
    """The policies that there are."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def role_arn(aws: Aws, role: str) -> str:
    """The ARN of a role given by name or ARN."""
    return role if role.startswith("arn:") else f"arn:{aws.partition}:iam::{aws.account}:role/{role}"


def policy(name: str, aws: Aws, store: str) -> dict[str, Any]:
    """Policy `name` for this account, region and store.

    Raises:
        DeployError: there is no such policy.
    """
    path = FOLDER / f"{name}.json"
    if not path.is_file():
        raise DeployError(f"there is no policy {name!r}, only {', '.join(names())}")
    place = S3Place.parse(store)
    text = Template(path.read_text()).substitute(
        account=aws.account,
        region=aws.region,
        partition=aws.partition,
        bucket=place.bucket,
        prefix=f"{place.prefix}/" if place.prefix else "",
        repository=REPOSITORY,
        project=PROJECT,
        execution_role=EXECUTION_ROLE,
        build_role=BUILD_ROLE,
        bedrock_role=BEDROCK_ROLE,
    )
    found: dict[str, Any] = json.loads(text)
    return found


def compact(document: dict[str, Any]) -> str:
    """A policy as IAM takes it."""
    return re.sub(r"\s+", " ", json.dumps(document, separators=(",", ":")))
