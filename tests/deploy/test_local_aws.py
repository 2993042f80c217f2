"""The local account by itself, through boto3: orders, shapes, states, streams, sessions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, ParamValidationError
from tests.fakes.running import running, wait_for

from lorahost_deploy import requests
from lorahost_deploy.local.containers import RunningServer
from lorahost_deploy.local.server import LocalAws
from lorahost_deploy.local.server import running as serving
from lorahost_deploy.local.state import Conduct
from lorahost_deploy.plan import Plan

from .conftest import DEMO, ENDPOINT, IMAGE, MODEL, REGION, STORE, Account, Cli

SITE = ("--endpoint", "demo", "--store", STORE)
PIRATE = DEMO / "adapters" / "pirate"
ROLE = "arn:aws:iam::123456789012:role/lorahost-execution"


def plan(**changes: Any) -> Plan:
    return Plan(endpoint="demo", image=IMAGE, instance_type="ml.g6e.2xlarge", **changes)


def bare(account: Account) -> Any:
    """A SageMaker client, after CreateModel without data."""
    client = account.client("sagemaker")
    client.create_model(ModelName="m", PrimaryContainer={"Image": IMAGE}, ExecutionRoleArn=ROLE)
    return client


def settle(client: Any, name: str) -> dict[str, Any]:
    """A component once it changes no more."""
    for _ in range(400):
        found: dict[str, Any] = client.describe_inference_component(InferenceComponentName=name)
        if not found["InferenceComponentStatus"].endswith("ing"):
            return found
        time.sleep(0.05)
    raise AssertionError(found)


def up(account: Account) -> Any:
    """An endpoint InService."""
    client = bare(account)
    config = requests.endpoint_config(plan(), ROLE)
    client.create_endpoint_config(**config)
    client.create_endpoint(**requests.endpoint(plan(), config["EndpointConfigName"]))
    client.get_waiter("endpoint_in_service").wait(EndpointName="demo", WaiterConfig={"Delay": 0.1, "MaxAttempts": 50})
    return client


def test_steps_in_the_wrong_order_are_refused(account: Account) -> None:
    client = bare(account)
    base = requests.base_component(plan(), "m")
    adapter = requests.adapter_component("a", "demo", "demo-base", "s3://models/a.tar.gz")
    config = requests.endpoint_config(plan(), ROLE)
    refuses(
        client.create_endpoint, "Could not find endpoint configuration", EndpointName="demo", EndpointConfigName="x"
    )
    refuses(client.create_inference_component, "Could not find endpoint", **base)
    client.create_endpoint_config(**config)
    refuses(client.create_endpoint_config, "Cannot create already existing endpoint configuration", **config)
    account.conduct.settle_s = 0.5
    try:
        client.create_endpoint(EndpointName="demo", EndpointConfigName=config["EndpointConfigName"])
        refuses(client.create_inference_component, "is Creating; it must be InService", **base)
        refuses(client.delete_endpoint, "in status Creating", EndpointName="demo")
        client.get_waiter("endpoint_in_service").wait(
            EndpointName="demo", WaiterConfig={"Delay": 0.1, "MaxAttempts": 50}
        )
        refuses(client.create_inference_component, "Could not find inference component", **adapter)
        client.create_inference_component(**base)
        refuses(client.create_inference_component, '"demo-base" is Creating; it must be InService', **adapter)
        refuses(client.delete_inference_component, "is Creating", InferenceComponentName="demo-base")
    finally:
        account.conduct.settle_s = 0.05
    assert settle(client, "demo-base")["InferenceComponentStatus"] == "InService"
    client.create_inference_component(**adapter)
    missing = settle(client, "a")
    assert missing["InferenceComponentStatus"] == "Failed"
    assert "Could not access the artifact at s3://models/a.tar.gz" in missing["FailureReason"]
    refuses(
        client.delete_inference_component, "1 adapter inference components use it", InferenceComponentName="demo-base"
    )
    refuses(client.delete_endpoint, "while it has inference components", EndpointName="demo")
    refuses(
        client.update_inference_component, "in status Failed", **requests.adapter_update("a", "s3://models/b.tar.gz")
    )


def refuses(call: Any, said: str, **parameters: Any) -> None:
    with pytest.raises(ClientError) as error:
        call(**parameters)
    assert error.value.response["Error"]["Code"] == "ValidationException"
    assert said in error.value.response["Error"]["Message"]


@pytest.mark.parametrize(
    ("change", "extra"),
    [
        ({"ModelName": "m"}, {}),
        ({"ComputeResourceRequirements": {"MinMemoryRequiredInMb": 1024}}, {}),
        ({"StartupParameters": {"ModelDataDownloadTimeoutInSeconds": 60}}, {}),
        ({}, {"VariantName": "AllTraffic"}),
        ({}, {"RuntimeConfig": {"CopyCount": 1}}),
        ({"Container": {"ArtifactUrl": "s3://b/a.tar.gz", "Image": IMAGE}}, {}),
    ],
)
def test_an_adapter_with_resources_of_its_own_is_refused(
    account: Account, change: dict[str, Any], extra: dict[str, Any]
) -> None:
    client = up(account)
    request = requests.adapter_component("a", "demo", "demo-base", "s3://models/a.tar.gz")
    request = {**request, **extra, "Specification": {**request["Specification"], **change}}
    with pytest.raises(ClientError, match=r"cannot be set when|nothing else in Container"):
        client.create_inference_component(**request)


def test_wrong_shapes_are_refused_as_the_service_would(account: Account) -> None:
    client = up(account)
    base = requests.base_component(plan(), "m")
    refuses(client.create_inference_component, "the most is 63", **{**base, "InferenceComponentName": "x" * 64})
    without = {k: v for k, v in base.items() if k not in ("VariantName", "RuntimeConfig")}
    refuses(client.create_inference_component, "VariantName, RuntimeConfig must be set", **without)
    with pytest.raises(ParamValidationError):
        client.create_inference_component(**base, Extra=1)
    config = requests.endpoint_config(plan(), ROLE)
    config["EndpointConfigName"] = "other"
    del config["ExecutionRoleArn"]
    refuses(client.create_endpoint_config, "ExecutionRoleArn is required", **config)


def test_lists_have_pages(account: Account) -> None:
    client = account.client("sagemaker")
    for i in range(13):
        client.create_model(ModelName=f"m{i}", PrimaryContainer={"Image": IMAGE}, ExecutionRoleArn=ROLE)
    pages = list(client.get_paginator("list_models").paginate())
    assert [len(page["Models"]) for page in pages] == [10, 3]
    assert len(client.list_models(NameContains="m1")["Models"]) == 4


def test_model_data_must_be_there(account: Account) -> None:
    request = requests.model(plan(), ROLE, "s3://models/nothing/")
    refuses(account.client("sagemaker").create_model, "Could not find model data at s3://models/nothing/", **request)


@pytest.mark.parametrize("run", range(3))
def test_streams_are_cut_anywhere_and_lose_nothing(cli: Cli, deployed: Account, run: int) -> None:
    cli("adapter", "add", "pirate", DEMO / "adapters" / "pirate", *SITE)
    answer = deployed.client("sagemaker-runtime").invoke_endpoint_with_response_stream(
        EndpointName="demo",
        InferenceComponentName="pirate",
        Accept="text/event-stream",
        Body=json.dumps({"prompt": "hi", "max_tokens": 40}).encode(),
    )
    assert answer["ContentType"].startswith("text/event-stream")
    assert answer["CustomAttributes"].startswith("adapter=pirate")
    parts = [event["PayloadPart"]["Bytes"] for event in answer["Body"]]
    lines = [line for line in b"".join(parts).decode().splitlines() if line]
    assert lines.pop() == "data: [DONE]"
    assert len(lines) == 40
    assert not all(part.endswith(b"\n") for part in parts)


def test_errors_of_the_container_become_model_errors(deployed: Account) -> None:
    runtime = deployed.client("sagemaker-runtime")
    with pytest.raises(ClientError) as error:
        runtime.invoke_endpoint(EndpointName="demo", InferenceComponentName="demo-base", Body=b"{")
    assert error.value.response["Error"]["Code"] == "ModelError"
    assert error.value.response["OriginalStatusCode"] == 400
    assert error.value.response["LogStreamArn"].endswith("/aws/sagemaker/InferenceComponents/demo-base")
    with pytest.raises(ClientError, match="Inference Component Name header is required"):
        runtime.invoke_endpoint(EndpointName="demo", Body=b"{}")
    with pytest.raises(ClientError, match="Endpoint gone of account"):
        runtime.invoke_endpoint(EndpointName="gone", InferenceComponentName="demo-base", Body=b"{}")


def test_a_session_stays_with_its_copy(cli: Cli, account: Account) -> None:
    cli("endpoint", "-f", state_file(account, {"LORAHOST_SESSIONS": "true"}), "--copies", 2)
    runtime = account.client("sagemaker-runtime")

    def call(body: dict[str, Any], session: str) -> Any:
        text = json.dumps(body).encode()
        asked = {"EndpointName": "demo", "InferenceComponentName": "demo-base", "SessionId": session}
        return runtime.invoke_endpoint(**asked, Body=text)

    session = call({"requestType": "NEW_SESSION"}, "NEW_SESSION")["NewSessionId"].partition(";")[0]
    # the other copy knows nothing of it and would answer 400
    for _ in range(4):
        assert call({"prompt": "hi", "max_tokens": 1}, session)["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert call({"requestType": "CLOSE"}, session)["ClosedSessionId"] == session


def state_file(account: Account, environment: dict[str, str]) -> Path:
    """A YAML file with the demo's endpoint; JSON is YAML."""
    wanted = {"endpoint": "demo", "image": IMAGE, "model": str(MODEL), "store": STORE, "environment": environment}
    file = account.local.world.work_dir / "state.yaml"
    file.write_text(json.dumps({**wanted, "instance_type": "ml.g6e.2xlarge"}))
    return file


def test_a_copy_added_later_has_all_adapters(cli: Cli, deployed: Account) -> None:
    cli("adapter", "add", "pirate", DEMO / "adapters" / "pirate", *SITE)
    before = deployed.ask("pirate")
    deployed.client("sagemaker").update_inference_component_runtime_config(
        InferenceComponentName="demo-base", DesiredRuntimeConfig={"CopyCount": 2}
    )
    settle(deployed.client("sagemaker"), "demo-base")
    assert {deployed.ask("pirate") for _ in range(6)} == {before}
    assert len(deployed.local.world.components["demo-base"].containers) == 2


def test_removed_adapters_leave_no_files(cli: Cli, deployed: Account) -> None:
    [container] = deployed.local.world.components["demo-base"].containers
    cli("adapter", "add", "pirate", DEMO / "adapters" / "pirate", *SITE)
    assert len(list(container.root.iterdir())) == 1
    cli("adapter", "update", "pirate", DEMO / "adapters" / "poet", *SITE)
    assert len(list(container.root.iterdir())) == 1
    cli("adapter", "rm", "pirate", *SITE)
    assert list(container.root.iterdir()) == []


def test_the_command_says_how_to_reach_it_and_stops(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lorahost.cli", "local-aws", "--port", "0", "--engine", "fake"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        url = first.split("AWS_ENDPOINT_URL=")[1].split()[0]
        keys = {"aws_access_key_id": "local", "aws_secret_access_key": "local"}
        client = boto3.client("sagemaker", region_name=REGION, endpoint_url=url, **keys)
        assert client.list_endpoint_configs()["EndpointConfigs"] == []
        identity = boto3.client("sts", region_name=REGION, endpoint_url=url, **keys).get_caller_identity()
        assert identity["Account"] == "123456789012"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_runs_already_and_sees_the_folder_elsewhere(account: Account, tmp_path: Path) -> None:
    """As with a container that has the folder mounted."""
    seen = tmp_path / "opt" / "ml" / "models"
    seen.parent.mkdir(parents=True)
    (tmp_path / "models").mkdir()
    seen.symlink_to(tmp_path / "models")
    with running(tmp_path / "server") as server:
        launcher = RunningServer(server.url, tmp_path / "models", seen)
        other = LocalAws(launcher, tmp_path / "work", region=REGION, conduct=Conduct(0.05))
        with serving(other):
            there = ("--endpoint-url", other.url, "--poll", "0.05")
            for words in (("endpoint", "--endpoint", "demo", *ENDPOINT), ("adapter", "add", "pirate", PIRATE, *SITE)):
                command = [sys.executable, "-m", "lorahost.cli", "deploy", *map(str, words), *there]
                subprocess.run(command, check=True, capture_output=True, timeout=120)
            assert Account(other).ask("pirate").startswith("pirate-")
            [listed] = server.get("/adapters").json()["adapters"]
            assert listed["src"].startswith(f"{seen}/container_123456789012-pirate-")
            assert listed["alias"] == "pirate"
        assert server.ping() == 200


def test_a_caller_that_leaves_ends_the_request(cli: Cli, deployed: Account) -> None:
    [container] = deployed.local.world.components["demo-base"].containers

    def running_requests() -> float:
        connection = container.connect(5)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        [value] = [line.rpartition(" ")[2] for line in lines if line.startswith("lorahost_running ")]
        return float(value)

    answer = deployed.client("sagemaker-runtime").invoke_endpoint_with_response_stream(
        EndpointName="demo",
        InferenceComponentName="demo-base",
        Body=json.dumps({"prompt": "hi", "max_tokens": 4000}).encode(),
    )
    events = iter(answer["Body"])
    next(events)
    assert running_requests() == 1
    answer["Body"].close()
    wait_for(lambda: running_requests() == 0, 5)
