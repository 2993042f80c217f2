"""`lorahost deploy bedrock`: an adapter as a model of its own in Bedrock."""

from __future__ import annotations

from pathlib import Path

import click

from lorahost_deploy.aws import Aws
from lorahost_deploy.bedrock import job
from lorahost_deploy.bedrock import merge as merging
from lorahost_deploy.options import verb
from lorahost_deploy.policies import BEDROCK_ROLE, role_arn

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group("bedrock")
def bedrock() -> None:
    """Merge an adapter into its base model and import the result into Bedrock, which runs no containers."""


@bedrock.command("merge")
@click.argument("adapter", type=FOLDER)
@click.option("--model", required=True, type=FOLDER, help="The base model's directory.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="New directory for the merged model.")
def merge(adapter: Path, model: Path, out: Path) -> None:
    """Write the base model with ADAPTER's change; needs no AWS."""
    merging.merge(model, adapter, out)


@bedrock.command("import")
@click.argument("name")
@click.argument("folder", type=FOLDER)
@click.option("--store", required=True, help="Where the model goes: s3://bucket/prefix.")
@click.option("--role", default=BEDROCK_ROLE, show_default=True, help="Role that Bedrock reads with.")
@verb
def import_(aws: Aws, name: str, folder: Path, store: str, role: str) -> None:
    """Upload the merged model in FOLDER and import it as NAME."""
    job.import_model(aws, name, folder, store, role_arn(aws, role))


@bedrock.command("invoke")
@click.argument("name")
@click.option("--prompt", required=True, help="Asked as one chat message.")
@click.option("--max-tokens", default=256, show_default=True)
@verb
def invoke(aws: Aws, name: str, prompt: str, max_tokens: int) -> None:
    """Ask the imported model NAME; loads it first when it was idle."""
    click.echo(job.invoke(aws, name, prompt, max_tokens), nl=not aws.dry_run)


@bedrock.command("rm")
@click.argument("name")
@verb
def rm(aws: Aws, name: str) -> None:
    """Delete the imported model NAME."""
    job.remove(aws, name)
