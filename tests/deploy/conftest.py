"""The local account with the fake engine, and the command line against it."""

from __future__ import annotations

import functools
import json
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import botocore.session
import pytest
from botocore.config import Config
from click.testing import CliRunner, Result

from lorahost.cli import main
from lorahost_deploy.local.containers import ProcessLauncher
from lorahost_deploy.local.server import LocalAws, running
from lorahost_deploy.local.state import Conduct

REGION = "eu-west-1"
BUCKET = "models"
STORE = f"s3://{BUCKET}/lorahost"
DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
MODEL = DEMO / "model"
IMAGE = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/lorahost:1"
Cli = Callable[..., Result]


class Account:
    """One fresh local account; `client` gives boto3 clients of it."""

    def __init__(self, local: LocalAws) -> None:
        self.local = local

    @property
    def conduct(self) -> Conduct:
        return self.local.conduct

    def client(self, service: str) -> Any:
        return boto3.client(
            service,
            region_name=REGION,
            endpoint_url=self.local.url,
            aws_access_key_id="local",
            aws_secret_access_key="local",
            config=Config(retries={"max_attempts": 0}, read_timeout=30),
        )

    def stored(self) -> list[str]:
        """All keys in the bucket."""
        return [item["Key"] for item in self.client("s3").list_objects_v2(Bucket=BUCKET).get("Contents", [])]

    def component(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.client("sagemaker").describe_inference_component(InferenceComponentName=name)
        return found

    def ask(self, component: str, endpoint: str = "demo") -> str:
        """Whose weights answered: the fake engine repeats its version."""
        answer = self.client("sagemaker-runtime").invoke_endpoint(
            EndpointName=endpoint,
            InferenceComponentName=component,
            Body=json.dumps({"prompt": "hi", "max_tokens": 2}).encode(),
            ContentType="application/json",
        )
        words = set(json.loads(answer["Body"].read())["choices"][0]["text"].split())
        [word] = words
        return str(word)


@pytest.fixture(scope="session", autouse=True)
def _credentials() -> Iterator[None]:
    """No test may reach a real account, or read a person's configuration."""
    names = {
        "AWS_ACCESS_KEY_ID": "local",
        "AWS_SECRET_ACCESS_KEY": "local",
        "AWS_REGION": REGION,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
            patch.delenv(name, raising=False)
        for name, value in names.items():
            patch.setenv(name, value)
        # each run of the command line has a session of its own; reading SageMaker's model takes long
        patch.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
        yield


@pytest.fixture(scope="session")
def _server(tmp_path_factory: pytest.TempPathFactory, _credentials: None) -> Iterator[LocalAws]:
    work = tmp_path_factory.mktemp("local-aws")
    with running(LocalAws(ProcessLauncher(work, "fake"), work, region=REGION, conduct=Conduct(0.05))) as local:
        yield local


@pytest.fixture
def account(_server: LocalAws) -> Iterator[Account]:
    """An account with a bucket and nothing else."""
    world, conduct = _server.world, _server.conduct
    urllib.request.urlopen(urllib.request.Request(f"{_server.url}/moto-api/reset", method="POST")).read()
    one = Account(_server)
    where = {"LocationConstraint": REGION}
    one.client("s3").create_bucket(Bucket=BUCKET, CreateBucketConfiguration=where)
    yield one
    conduct.deny.clear()
    conduct.quotas.clear()
    conduct.failing.clear()
    for component in list(world.components.values()):
        for container in component.containers:
            if container.process is not None:
                os.killpg(container.process.pid, signal.SIGKILL)
    for known in (world.models, world.configs, world.endpoints, world.components, world.targets, world.policies):
        known.clear()


@pytest.fixture
def cli(account: Account) -> Cli:
    """Runs `lorahost deploy ...` against the account, without a pause between looks."""

    def run(*arguments: object, ok: bool = True) -> Result:
        words = [str(argument) for argument in arguments]
        result = CliRunner().invoke(main, ["deploy", *words, "--endpoint-url", account.local.url, "--poll", "0.05"])
        if ok:
            assert result.exit_code == 0, result.output
        else:
            assert result.exit_code != 0, result.output
            assert isinstance(result.exception, SystemExit), result.exception
        return result

    return run


ENDPOINT = ("--image", IMAGE, "--model", MODEL, "--store", STORE, "--instance-type", "ml.g6e.2xlarge")


@pytest.fixture
def deployed(cli: Cli, account: Account) -> Account:
    """An account with the endpoint `demo` and its base model."""
    cli("endpoint", "--endpoint", "demo", *ENDPOINT)
    return account
