"""`lorahost deploy adapter sync`: makes an endpoint's adapters what a directory or a file says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from lorahost_deploy import adapter, artifact, components, console, history, plan
from lorahost_deploy.adapter import Site, version_of
from lorahost_deploy.artifact import Artifact
from lorahost_deploy.aws import Aws
from lorahost_deploy.errors import DeployError
from lorahost_deploy.options import verb
from lorahost_deploy.plan import Plan


@dataclass(frozen=True)
class Step:
    """What happens to one adapter: `add`, `update`, `wait` for a change under way, `keep` or `remove`."""

    action: str
    name: str
    live: str
    wanted: Artifact | None


@adapter.adapter.command("sync")
@click.option(
    "--dir", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path), help="One adapter a folder."
)
@click.option("--keep-others", is_flag=True, help="Remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@adapter.site_options
@adapter.model_options
@verb
def sync(
    aws: Aws,
    folder: Path | None,
    keep_others: bool,
    yes: bool,
    file: Path | None,
    max_rank: int | None,
    **options: Any,
) -> None:
    """Add, update and remove adapters until they are those of a directory or of the file's `adapters`."""
    wanted = plan.load(file, **options)
    directories = _directories(folder) if folder else dict(wanted.adapters)
    if not directories and folder is None and file is None:
        raise DeployError("nothing says which adapters are wanted: give --dir or -f")
    site = Site.of(wanted)
    steps = make_plan(aws, wanted, directories, max_rank, keep_others)
    rows = [(s.action, s.name, version_of(s.live), s.wanted.digest[:12] if s.wanted else "") for s in steps]
    console.say(console.table(("", "adapter", "deployed", "wanted"), rows))
    changes = [step for step in steps if step.action != "keep"]
    if not changes:
        console.say("nothing to do")
    elif not (yes or aws.dry_run):
        click.confirm(f"{len(changes)} changes; go on?", abort=True, err=True)
    apply(aws, site, steps)


def _directories(folder: Path) -> dict[str, Path]:
    found = {p.name: p for p in sorted(folder.iterdir()) if p.is_dir() and not p.name.startswith(".")}
    if not found:
        raise DeployError(f"--dir {folder}: no directory in it; each adapter is one")
    return found


def make_plan(
    aws: Aws, wanted: Plan, directories: dict[str, Path], max_rank: int | None, keep_others: bool
) -> list[Step]:
    """Compares; all adapters are checked before anything is changed.

    Raises:
        DeployError: adapters that can't be served, all of them named.
    """
    plan.load(None, endpoint=wanted.endpoint, adapters=directories)
    ready: dict[str, Artifact] = {}
    refused: list[str] = []
    if directories:
        with artifact.base_config(aws, wanted.base, wanted.model) as (model, server_rank):
            for name, path in directories.items():
                try:
                    ready[name] = artifact.check(name, path, model, max_rank or server_rank)
                except DeployError as error:
                    refused.append(error.message)
    if refused:
        raise DeployError("nothing was changed, these can't be served:\n" + "\n".join(refused))
    place = Site.of(wanted).place
    deployed = components.adapters_of(aws, wanted.endpoint, wanted.base)
    steps = []
    for name, one in sorted(ready.items()):
        component = deployed.get(name)
        live = components.artifact_url(component) if component else ""
        steps.append(Step(_action(component, live == one.url(place)), name, live, one))
    gone = [] if keep_others else sorted(set(deployed) - set(ready))
    return [*steps, *(Step("remove", name, components.artifact_url(deployed[name]), None) for name in gone)]


def _action(component: components.Component | None, same: bool) -> str:
    if component is None:
        return "add"
    state = component[components.STATUS]
    if not same or state == "Failed":
        return "update"
    return "keep" if state == "InService" else "wait"


def apply(aws: Aws, site: Site, steps: list[Step]) -> None:
    """Starts all changes, then waits for each; one that fails stops no other.

    Raises:
        DeployError: some failed, all of them named.
    """
    failed: dict[str, str] = {}
    for step in steps:
        try:
            _start(aws, site, step)
        except DeployError as error:
            failed[step.name] = error.message
    for step in steps:
        if step.name in failed:
            continue
        try:
            _finish(aws, site, step)
        except DeployError as error:
            failed[step.name] = error.message
    if failed:
        raise DeployError(f"{len(failed)} of {len(steps)} adapters failed:\n" + "\n".join(failed.values()))


def _start(aws: Aws, site: Site, step: Step) -> None:
    if step.wanted is None:
        components.start_delete(aws, step.name)
    elif step.action != "keep":
        url = artifact.upload(aws, step.wanted, site.place)
        components.start_adapter(aws, step.name, site.endpoint, site.base, url)


def _finish(aws: Aws, site: Site, step: Step) -> None:
    if step.wanted is None:
        components.finish_delete(aws, step.name, f"adapter {step.name}")
        history.forget(aws, site.place, step.name)
        return
    url = step.wanted.url(site.place)
    if step.action != "keep":
        components.finish_adapter(aws, step.name, site.base, url)
    history.record(aws, site.place, step.name, step.live, url, fresh=step.action == "add")
