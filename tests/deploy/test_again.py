"""Each verb twice, each verb stopped half-way and run again, each verb as a dry run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorahost_deploy.aws import Aws

from .conftest import DEMO, ENDPOINT, STORE, Account, Cli

SITE = ("--endpoint", "demo", "--store", STORE)
PIRATE = DEMO / "adapters" / "pirate"
IMAGE = ("image", "--source", "https://github.com/owner/lorahost", "--no-build")
DEPLOY = ("endpoint", "--endpoint", "demo", *ENDPOINT, "--min-instances", "0")
SCALE = ("autoscale", "--endpoint", "demo", "--min", "0", "--max", "2")
TEARDOWN = ("teardown", "--endpoint", "demo", "--store", STORE, "--shared", "--yes")


def changes(cli: Cli, *arguments: object) -> list[tuple[str, dict[str, Any]]]:
    """Operations and parameters that a dry run prints."""
    printed = json.loads(cli(*arguments, "--dry-run").stdout)
    return [(one["operation"], one["parameters"]) for one in printed]


@pytest.fixture
def stopping(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a verb that is stopped after each of its changes, and run again, until it gets through.

    Yields the number of runs.
    """
    send, upload = Aws._send, Aws.upload
    made = 0

    def after(result: Any) -> Any:
        nonlocal made
        made += 1
        if made == 1:
            raise KeyboardInterrupt
        return result

    def stopping_send(aws: Aws, service: str, operation: str, parameters: Any, *, reading: bool) -> Any:
        result = send(aws, service, operation, parameters, reading=reading)
        changing = not operation.startswith(("Describe", "List", "Get", "Head", "BatchGet", "Filter"))
        return after(result) if changing else result

    def stopping_upload(aws: Aws, *arguments: Any) -> None:
        upload(aws, *arguments)
        if not aws.dry_run:
            after(None)

    def run(*arguments: object) -> int:
        nonlocal made
        for count in range(1, 40):
            left = changes(cli, *arguments)
            made = 0
            with monkeypatch.context() as patch:
                patch.setattr(Aws, "_send", stopping_send)
                patch.setattr(Aws, "upload", stopping_upload)
                result = cli(*arguments, ok=not left)
            if not left:
                return count
            assert result.exit_code == 130, result.output
            assert "run the same command again" in result.stderr
        raise AssertionError("it never got through")

    return run


def test_each_verb_stopped_after_each_change_gets_there(
    cli: Cli, account: Account, stopping: Callable[..., int], tmp_path: Path
) -> None:
    folder = tmp_path / "adapters"
    for name in ("shout", "poet"):
        shutil.copytree(DEMO / "adapters" / name, folder / name)
    assert stopping("role", "--store", STORE) == 5
    assert stopping(*IMAGE) == 4
    # six files, model, configuration, endpoint, base component
    assert stopping(*DEPLOY) == 11
    assert stopping("adapter", "add", "pirate", PIRATE, *SITE) == 4
    assert account.ask("pirate").startswith("pirate-")
    before = account.ask("pirate")
    assert stopping("adapter", "update", "pirate", DEMO / "adapters" / "poet", *SITE) == 4
    assert account.ask("pirate") != before
    assert stopping("adapter", "sync", "--dir", folder, *SITE, "--yes") == 8
    assert stopping(*SCALE) == 5
    assert account.ask("shout").startswith("shout-")
    assert stopping(*TEARDOWN) > 8
    world = account.local.world
    assert (world.models, world.configs, world.endpoints, world.components) == ({}, {}, {}, {})
    assert account.stored() == []


def test_each_verb_does_nothing_the_second_time(cli: Cli, account: Account, tmp_path: Path) -> None:
    shutil.copytree(PIRATE, tmp_path / "pirate")
    verbs = [
        ("role", "--store", STORE),
        IMAGE,
        DEPLOY,
        ("adapter", "add", "pirate", PIRATE, *SITE),
        ("adapter", "update", "pirate", PIRATE, *SITE),
        ("adapter", "sync", "--dir", tmp_path, *SITE, "--yes"),
        SCALE,
    ]
    for verb in verbs:
        cli(*verb)
        assert changes(cli, *verb) == [], verb
        cli(*verb)
    cli("adapter", "rm", "pirate", *SITE)
    assert changes(cli, "adapter", "rm", "pirate", *SITE) == []
    cli("adapter", "rm", "pirate", *SITE)
    cli(*TEARDOWN)
    assert changes(cli, *TEARDOWN) == []
    cli(*TEARDOWN)


def test_a_dry_run_says_exactly_what_follows_and_does_nothing(cli: Cli, deployed: Account) -> None:
    before = (deployed.stored(), dict(deployed.local.world.components))
    planned = changes(cli, "adapter", "add", "pirate", PIRATE, *SITE)
    assert (deployed.stored(), dict(deployed.local.world.components)) == before
    assert [operation for operation, _ in planned] == ["PutObject", "CreateInferenceComponent", "PutObject"]
    url = f"s3://models/{planned[0][1]['Key']}"
    assert planned[1][1] == {
        "InferenceComponentName": "pirate",
        "EndpointName": "demo",
        "Specification": {"BaseInferenceComponentName": "demo-base", "Container": {"ArtifactUrl": url}},
    }
    cli("adapter", "add", "pirate", PIRATE, *SITE)
    update = changes(cli, "adapter", "update", "pirate", DEMO / "adapters" / "poet", *SITE)
    assert [operation for operation, _ in update] == ["PutObject", "UpdateInferenceComponent", "PutObject"]
    new = f"s3://models/{update[0][1]['Key']}"
    assert new != url
    assert update[1][1] == {"InferenceComponentName": "pirate", "Specification": {"Container": {"ArtifactUrl": new}}}


def test_the_endpoint_as_a_dry_run(cli: Cli, account: Account) -> None:
    planned = dict(changes(cli, *DEPLOY, "--env", "SM_VLLM_MAX_MODEL_LEN=4096"))
    [variant] = planned["CreateEndpointConfig"]["ProductionVariants"]
    assert "ModelName" not in variant
    assert variant["ManagedInstanceScaling"] == {"Status": "ENABLED", "MinInstanceCount": 0, "MaxInstanceCount": 1}
    assert variant["RoutingConfig"] == {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"}
    assert variant["InferenceAmiVersion"] == "al2023-ami-sagemaker-inference-gpu-4-1"
    assert variant["ContainerStartupHealthCheckTimeoutInSeconds"] >= 1800
    base = planned["CreateInferenceComponent"]
    assert base["Specification"]["ModelName"] == planned["CreateModel"]["ModelName"]
    assert base["Specification"]["ComputeResourceRequirements"]["NumberOfAcceleratorDevicesRequired"] == 1
    assert planned["CreateModel"]["PrimaryContainer"]["Environment"] == {"SM_VLLM_MAX_MODEL_LEN": "4096"}
    assert account.stored() == []


def test_a_dry_run_needs_no_account(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    result = cli(*DEPLOY, "--dry-run")
    assert "takes the account for empty" in result.stderr
    assert "CreateInferenceComponent" in [one["operation"] for one in json.loads(result.stdout)]
    for verb in (
        ("role", "--store", STORE),
        IMAGE,
        ("adapter", "add", "p", PIRATE, *SITE, "--model", DEMO / "model"),
        SCALE,
    ):
        assert json.loads(cli(*verb, "--dry-run").stdout)
    assert "aws configure" in cli(*DEPLOY, ok=False).stderr


def test_what_can_not_be_sent_is_not_even_planned(cli: Cli, deployed: Account) -> None:
    said = cli("adapter", "add", "x" * 64, PIRATE, *SITE, "--dry-run", ok=False).stderr
    assert "at most 63 characters" in said
    said = cli(*DEPLOY, "--dry-run", "--instance-type", "ml.toaster", ok=False).stderr
    assert "ProductionVariants[0].InstanceType is 'ml.toaster'; it must be one of" in said
