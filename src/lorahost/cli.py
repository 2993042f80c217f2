"""The `lorahost` command."""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import NoReturn

import click

import lorahost
from lorahost import client, doctor, logs, preflight, settings_page, tune_cli
from lorahost.bench.cli import bench
from lorahost.errors import HostError
from lorahost.exit_codes import ExitCode
from lorahost.settings import load_settings

# Groups of the deployment half, with the modules that they are in: the server needs none of what those import.
DEPLOYMENT = {"deploy": ("lorahost_deploy.cli", "deploy"), "local-aws": ("lorahost_deploy.local.command", "local_aws")}


class _Lazy(click.Group):
    """Imports the deployment commands when they are asked for."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*super().list_commands(context), *DEPLOYMENT])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in DEPLOYMENT:
            return super().get_command(context, name)
        module, attribute = DEPLOYMENT[name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(lorahost.__version__)
def main() -> None:
    """One base model and dozens of LoRA adapters on one accelerator."""


@main.command()
def serve() -> None:
    """Run the server; settings come from the environment (`lorahost doctor --settings`)."""
    try:
        settings = load_settings()
    except HostError as error:
        _die("settings", error.message, ExitCode.SETTINGS)
    for finding in preflight.run(settings, os.environ):
        if not finding.ok:
            _die(finding.check, finding.message, finding.exit_code)
    logs.configure(settings.log_level)
    from lorahost.http.gunicorn_app import HostApplication

    HostApplication(settings).run()


def _die(check: str, message: str, code: int) -> NoReturn:
    click.echo(json.dumps({"level": "error", "check": check, "message": message, "exit_code": code}))
    sys.exit(code)


@main.command("doctor")
@click.option("--settings", "show_settings", is_flag=True, help="List every setting with its default and meaning.")
@click.option("--settings-page", "show_page", is_flag=True, help="Print docs/settings.md.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor_(show_settings: bool, show_page: bool, as_json: bool) -> None:
    """Say what will run here and why."""
    if show_page:
        click.echo(settings_page.page(), nl=False)
        return
    if show_settings:
        click.echo(settings_page.table())
        return
    report = doctor.report(os.environ)
    click.echo(json.dumps(report, indent=2) if as_json else doctor.text(report))
    sys.exit(0 if report["ok"] else 1)


URL = click.option(
    "--url",
    envvar="LORAHOST_URL",
    default="http://localhost:8080",
    show_default=True,
    help="The server; LORAHOST_URL sets it, too.",
)


@main.group()
def adapters() -> None:
    """Manage the adapters of a running server."""


@adapters.command("add")
@click.argument("name")
@click.argument("src")
@click.option("--no-preload", is_flag=True, help="Load it with its first request.")
@click.option("--pin", is_flag=True, help="Never evict it.")
@URL
def add(url: str, name: str, src: str, no_preload: bool, pin: bool) -> None:
    """Register adapter NAME from SRC: a directory or tar.gz on the server's disk, or s3://."""
    _report(client.add(url, name, src, preload=not no_preload, pin=pin))


@adapters.command("ls")
@URL
def ls(url: str) -> None:
    """List the adapters."""
    status, page = client.ls(url)
    if status >= 400:
        _report((status, page))
    click.echo(client.table(page["adapters"]))


@adapters.command("rm")
@click.argument("name")
@URL
def rm(url: str, name: str) -> None:
    """Unregister adapter NAME once its requests are done."""
    _report(client.rm(url, name))


@adapters.command("check")
@click.argument("path", type=click.Path(exists=True, file_okay=False))
@click.option("--model", required=True, type=click.Path(exists=True), help="The base model's directory or config.json.")
@click.option("--max-rank", default=32, show_default=True, help="Largest rank that the server takes.")
def check(path: str, model: str, max_rank: int) -> None:
    """Say whether the adapter in PATH can be served on a base model; needs no server."""
    try:
        click.echo(json.dumps(client.check(path, model, max_rank), indent=2))
    except HostError as error:
        click.echo(json.dumps(error.body(), indent=2), err=True)
        sys.exit(1)


main.add_command(tune_cli.tune)
main.add_command(bench)


def _report(answer: client.Answer) -> NoReturn:
    status, body = answer
    click.echo(json.dumps(body, indent=2), err=status >= 400)
    sys.exit(0 if status < 400 else 1)


if __name__ == "__main__":
    main()
