"""`lorahost deploy adapter`: one inference component per fine-tune."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from lorahost_deploy import artifact, components, console, history, plan
from lorahost_deploy.artifact import Artifact
from lorahost_deploy.aws import Aws
from lorahost_deploy.errors import DeployError
from lorahost_deploy.options import file_option, verb
from lorahost_deploy.plan import Plan, S3Place

Command = Callable[..., None]


@dataclass(frozen=True)
class Site:
    """Where adapters go: a base component and a place in S3."""

    endpoint: str
    base: str
    place: S3Place

    @classmethod
    def of(cls, wanted: Plan) -> Site:
        """The site of a plan; raises DeployError when it names no store."""
        wanted.need("store")
        return cls(wanted.endpoint, wanted.base, S3Place.parse(wanted.store))


def site_options(function: Command) -> Command:
    """Options that say where adapters go."""
    function = click.option("--store", help="Where archives go: s3://bucket/prefix.")(function)
    function = click.option("--endpoint", help="The endpoint's name.")(function)
    return file_option(function)


def model_options(function: Command) -> Command:
    """Options of the check before an upload."""
    function = click.option("--max-rank", type=int, help="Largest rank, by default the deployed server's.")(function)
    return click.option("--model", help="The base model, by default the deployed one.")(function)


@click.group("adapter")
def adapter() -> None:
    """Add, update, roll back, list and remove adapters."""


@adapter.command("add")
@click.argument("name")
@click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
@site_options
@model_options
@verb
def add(aws: Aws, name: str, path: Path, file: Path | None, max_rank: int | None, **options: Any) -> None:
    """Deploy the adapter in PATH as inference component NAME."""
    wanted = plan.load(file, **options)
    put(aws, Site.of(wanted), checked(aws, wanted, name, path, max_rank), new=True)


@adapter.command("update")
@click.argument("name")
@click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
@site_options
@model_options
@verb
def update(aws: Aws, name: str, path: Path, file: Path | None, max_rank: int | None, **options: Any) -> None:
    """Give NAME the weights in PATH."""
    wanted = plan.load(file, **options)
    put(aws, Site.of(wanted), checked(aws, wanted, name, path, max_rank), new=False)


@adapter.command("rollback")
@click.argument("name")
@site_options
@verb
def rollback(aws: Aws, name: str, file: Path | None, **options: Any) -> None:
    """Go back to the version before the live one."""
    site = Site.of(plan.load(file, **options))
    found = components.settled(aws, name)
    if found is None:
        raise DeployError(f"there is no adapter {name}")
    live = components.artifact_url(found)
    earlier = history.before(history.read(aws, site.place, name), live)
    if earlier is None:
        raise DeployError(f"adapter {name}: {live} is its first version, there is none before it")
    components.start_adapter(aws, name, site.endpoint, site.base, earlier)
    components.finish_adapter(aws, name, site.base, earlier)
    console.say(f"adapter {name}: back at {version_of(earlier)}")


@adapter.command("ls")
@site_options
@verb
def ls(aws: Aws, file: Path | None, **options: Any) -> None:
    """List the endpoint's adapters."""
    wanted = plan.load(file, **options)
    found = components.adapters_of(aws, wanted.endpoint, wanted.base)
    rows = [
        (n, c[components.STATUS], version_of(components.artifact_url(c)), c.get("FailureReason"))
        for n, c in found.items()
    ]
    click.echo(console.table(("adapter", "status", "version", "reason"), rows))


@adapter.command("rm")
@click.argument("names", nargs=-1, required=True)
@site_options
@verb
def rm(aws: Aws, names: tuple[str, ...], file: Path | None, **options: Any) -> None:
    """Remove adapters; with --store their history too. The archives stay."""
    wanted = plan.load(file, **options)
    for name in names:
        found = components.look(aws, name)
        if found is not None and components.base_name(found) != wanted.base:
            raise DeployError(f"component {name} is no adapter of {wanted.base}; nothing was removed")
        remove(aws, name, S3Place.parse(wanted.store) if wanted.store else None)


def checked(aws: Aws, wanted: Plan, name: str, path: Path, max_rank: int | None) -> Artifact:
    """The adapter in `path`, once the importer has taken it and its name is one for SageMaker."""
    plan.load(None, endpoint=wanted.endpoint, adapters={name: path})
    with artifact.base_config(aws, wanted.base, wanted.model) as (model, server_rank):
        found = artifact.check(name, path, model, max_rank or server_rank)
    for warning in found.warnings:
        console.say(f"adapter {name}: {warning}")
    return found


def put(aws: Aws, site: Site, wanted: Artifact, *, new: bool) -> None:
    """Uploads and deploys one version.

    Raises:
        DeployError: `new` and another version is deployed, or not `new` and none is.
    """
    found = components.settled(aws, wanted.name)
    url = wanted.url(site.place)
    live = components.artifact_url(found) if found and found[components.STATUS] != "Failed" else ""
    if new and live and live != url:
        raise DeployError(f"adapter {wanted.name} is deployed with {version_of(live)}: use `adapter update`")
    if not new and found is None and not aws.offline:
        raise DeployError(f"there is no adapter {wanted.name}: use `adapter add`")
    artifact.upload(aws, wanted, site.place)
    if not components.start_adapter(aws, wanted.name, site.endpoint, site.base, url):
        console.say(f"adapter {wanted.name}: {wanted.digest[:12]} is deployed already")
    components.finish_adapter(aws, wanted.name, site.base, url)
    history.record(aws, site.place, wanted.name, live, url, fresh=found is None)


def remove(aws: Aws, name: str, place: S3Place | None) -> None:
    """Removes an adapter and, with a place, its history; what is gone already is fine."""
    components.delete(aws, name, f"adapter {name}")
    if place is not None:
        history.forget(aws, place, name)


def version_of(url: str) -> str:
    """The digest in an archive's address, short; the address when there is none."""
    name = url.rpartition("/")[2].removesuffix(".tar.gz")
    return name[:12] if len(name) == 64 else url
