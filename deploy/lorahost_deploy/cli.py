"""The groups that the `lorahost` command finds only when they are asked for."""

from __future__ import annotations

import click

from lorahost_deploy.adapter import adapter
from lorahost_deploy.autoscale import autoscale
from lorahost_deploy.bedrock.command import bedrock
from lorahost_deploy.endpoint import endpoint
from lorahost_deploy.image import image
from lorahost_deploy.invoke import invoke
from lorahost_deploy.role import role
from lorahost_deploy.status import status
from lorahost_deploy.sync import sync
from lorahost_deploy.teardown import teardown


@click.group("deploy")
def deploy() -> None:
    """Deploy to SageMaker; each verb can be run again, and has --dry-run."""


for command in (image, role, endpoint, adapter, invoke, autoscale, status, teardown, bedrock):
    deploy.add_command(command)

__all__ = ["deploy", "sync"]
