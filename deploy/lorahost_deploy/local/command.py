"""`lorahost local-aws`."""

from __future__ import annotations

import contextlib
import signal
import tempfile
from pathlib import Path
from typing import NoReturn

import click

from lorahost_deploy.errors import DeployError


@click.command("local-aws")
@click.option("--port", default=4566, show_default=True, help="Port of this machine; 0 takes a free one.")
@click.option("--engine", type=click.Choice(["vllm", "fake"]), default="vllm", show_default=True, help="What answers.")
@click.option("--container-url", help="Take the server that runs there instead of starting one for each copy.")
@click.option("--models-dir", type=click.Path(path_type=Path), help="Folder that this server sees, too.")
@click.option("--container-models-dir", type=click.Path(path_type=Path), help="Where that server sees it.")
@click.option("--region", default="eu-west-1", show_default=True)
@click.option("--settle", default=1.0, show_default=True, help="Seconds that each change takes at least.")
@click.option("--deny", multiple=True, help="IAM action to refuse, such as sagemaker:CreateEndpoint.")
@click.option("--quota", multiple=True, help="Most instances of a type, such as ml.g6e.2xlarge=1.")
def local_aws(
    port: int,
    engine: str,
    container_url: str | None,
    models_dir: Path | None,
    container_models_dir: Path | None,
    region: str,
    settle: float,
    deny: tuple[str, ...],
    quota: tuple[str, ...],
) -> None:
    """Play the AWS services that deployment uses, around real containers; needs the extras deploy and local-aws."""
    try:
        import moto.server  # noqa: F401

        from lorahost_deploy.local.containers import Launcher, ProcessLauncher, RunningServer
        from lorahost_deploy.local.server import LocalAws, running
        from lorahost_deploy.local.state import Conduct
    except ModuleNotFoundError as error:
        raise DeployError(f"no module {error.name}: pip install -e '.[deploy,local-aws]' in a checkout") from error

    if (container_url is None) != (models_dir is None):
        raise DeployError("--container-url and --models-dir belong together: the server reads adapters from there")
    conduct = Conduct(settle_s=settle, deny=set(deny), quotas=_quotas(quota))
    with tempfile.TemporaryDirectory(prefix="lorahost-aws-") as work:
        launcher: Launcher = ProcessLauncher(Path(work), engine)
        if container_url is not None and models_dir is not None:
            models_dir.mkdir(parents=True, exist_ok=True)
            launcher = RunningServer(container_url, models_dir.resolve(), container_models_dir or models_dir.resolve())
        try:
            local = LocalAws(launcher, Path(work), port=port, region=region, conduct=conduct)
        except (OSError, SystemExit) as error:
            raise DeployError(f"--port {port}: can't listen there: {error}") from error
        signal.signal(signal.SIGTERM, _stop)
        with running(local), contextlib.suppress(KeyboardInterrupt):
            click.echo(f"export AWS_ENDPOINT_URL={local.url} AWS_REGION={region}")
            click.echo("export AWS_ACCESS_KEY_ID=local AWS_SECRET_ACCESS_KEY=local")
            signal.pause()


def _stop(*_: object) -> NoReturn:
    """SIGTERM ends it as Ctrl-C does."""
    raise KeyboardInterrupt


def _quotas(values: tuple[str, ...]) -> dict[str, int]:
    found = {}
    for value in values:
        kind, _, count = value.partition("=")
        if not count.isdigit():
            raise click.BadParameter(f"--quota {value!r}: expected TYPE=COUNT")
        found[kind] = int(count)
    return found
