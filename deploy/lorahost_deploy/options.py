"""Options that all verbs have, and what happens around a verb."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from lorahost_deploy.aws import Aws
from lorahost_deploy.errors import DeployError

Command = Callable[..., None]


def verb(function: Command) -> Command:
    """Makes the first argument an `Aws` from the options; a dry run ends with its requests on standard output."""

    @click.option("--region", envvar="AWS_REGION", help="AWS region, by default the environment's or the profile's.")
    @click.option("--profile", help="Profile of the AWS configuration.")
    @click.option("--endpoint-url", envvar="AWS_ENDPOINT_URL", help="Where `lorahost local-aws` listens.")
    @click.option("--dry-run", is_flag=True, help="Print the changes as JSON, checked but not made.")
    @click.option("--poll", default=15.0, show_default=True, help="Seconds between two looks while waiting.")
    @functools.wraps(function)
    def command(
        *arguments: Any,
        region: str | None,
        profile: str | None,
        endpoint_url: str | None,
        dry_run: bool,
        poll: float,
        **options: Any,
    ) -> None:
        aws = Aws(region=region, profile=profile, endpoint_url=endpoint_url, dry_run=dry_run, poll_s=poll)
        try:
            function(aws, *arguments, **options)
        except KeyboardInterrupt:
            raise StoppedError("stopped; run the same command again, it goes on where it stopped") from None
        finally:
            if dry_run:
                aws.print_requests()

    return command


class StoppedError(DeployError):
    """Ctrl-C, with the shell's usual exit code."""

    exit_code = 130


def file_option(function: Command) -> Command:
    """`-f`, the YAML file with the desired state."""
    kind = click.Path(exists=True, dir_okay=False, path_type=Path)
    return click.option("-f", "--file", type=kind, help="Desired state as YAML; options overrule it.")(function)


def endpoint_option(function: Command) -> Command:
    """`--endpoint`."""
    return click.option("--endpoint", required=True, help="The endpoint's name.")(function)


def pairs(_: Any, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """`NAME=VALUE` options as a dict."""
    found = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"{value!r} is not NAME=VALUE", param=parameter)
        found[name] = text
    return found
