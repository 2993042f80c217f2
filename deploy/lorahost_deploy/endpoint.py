"""`lorahost deploy endpoint`: model, endpoint configuration, endpoint and base inference component."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from lorahost_deploy import components, console, plan, requests, scaling, store, waiting
from lorahost_deploy.aws import Aws
from lorahost_deploy.compare import holds
from lorahost_deploy.errors import DeployError
from lorahost_deploy.options import file_option, pairs, verb
from lorahost_deploy.plan import Plan
from lorahost_deploy.policies import role_arn

STATUS = "EndpointStatus"


@click.command("endpoint")
@file_option
@click.option("--endpoint", help="The endpoint's name.")
@click.option("--image", help="The container image in ECR.")
@click.option("--model", help="Base model: a local directory, or s3://bucket/prefix/.")
@click.option("--store", help="Where uploads go: s3://bucket/prefix.")
@click.option("--role", help="Execution role, name or ARN.")
@click.option("--instance-type", help="Such as ml.g6e.2xlarge.")
@click.option("--min-instances", type=int, help="0 allows scaling to zero.")
@click.option("--max-instances", type=int)
@click.option("--accelerators", type=int, help="Accelerators of one copy.")
@click.option("--memory-mb", type=int, help="Memory of one copy.")
@click.option("--copies", type=int, help="Copies of the base model.")
@click.option("--cuda", help="The image's CUDA, which picks the instance's driver.")
@click.option("--env", "environment", multiple=True, callback=pairs, help="NAME=VALUE for the container.")
@verb
def endpoint(aws: Aws, file: Path | None, **options: Any) -> None:
    """Create or update the endpoint and its base model."""
    ensure(aws, plan.load(file, **options))


def ensure(aws: Aws, wanted: Plan) -> None:
    """Makes the endpoint what the plan says; what is so already stays untouched."""
    wanted.need("image", "model", "instance_type")
    role = role_arn(aws, wanted.role)
    model = requests.model(wanted, role, store.model_url(aws, wanted))
    config = requests.endpoint_config(wanted, role)
    _once(aws, "Model", model)
    _once(aws, "EndpointConfig", config)
    _endpoint(aws, wanted, config["EndpointConfigName"])
    _base(aws, wanted, model["ModelName"])
    _remove_old(aws, wanted.endpoint, model["ModelName"], config["EndpointConfigName"])


def look(aws: Aws, name: str) -> dict[str, Any] | None:
    """The endpoint's description."""
    return aws.find("sagemaker", "DescribeEndpoint", EndpointName=name)


def _once(aws: Aws, kind: str, request: dict[str, Any]) -> None:
    """Creates something that can't be changed; its name says what is in it."""
    name = {f"{kind}Name": request[f"{kind}Name"]}
    if aws.find("sagemaker", f"Describe{kind}", **name) is None:
        aws.change("sagemaker", f"Create{kind}", request)
        console.say(f"{kind} {request[f'{kind}Name']}: created")


def _endpoint(aws: Aws, wanted: Plan, config: str) -> None:
    name, what = wanted.endpoint, f"endpoint {wanted.endpoint}"
    found = waiting.settled(aws, lambda: look(aws, name), STATUS, what, 7200.0)
    if found is not None and found[STATUS] == "Failed":
        console.say(f"{what}: failed before ({found.get('FailureReason', '')}), created anew")
        aws.remove("sagemaker", "DeleteEndpoint", EndpointName=name)
        waiting.gone(aws, lambda: look(aws, name), STATUS, what)
        found = None
    if found is None:
        aws.change("sagemaker", "CreateEndpoint", requests.endpoint(wanted, config))
    elif found["EndpointConfigName"] != config:
        aws.change("sagemaker", "UpdateEndpoint", {"EndpointName": name, "EndpointConfigName": config})
    waiting.in_service(aws, lambda: look(aws, name), STATUS, what, waiting.endpoint_logs(name))


def _base(aws: Aws, wanted: Plan, model: str) -> None:
    name = wanted.base
    found = components.settled(aws, name)
    if found is not None and found[components.STATUS] == "Failed":
        if adapters := components.adapters_of(aws, wanted.endpoint, name):
            raise DeployError(
                f"base {name} is Failed ({found.get('FailureReason', '')}) and can't be made anew while it has "
                f"adapters: remove {', '.join(adapters)} with `lorahost deploy adapter rm` first"
            )
        console.say(f"base {name}: failed before ({found.get('FailureReason', '')}), created anew")
        components.delete(aws, name, f"base {name}")
        found = None
    specification = requests.base_specification(wanted, model)
    if found is None:
        aws.change("sagemaker", "CreateInferenceComponent", requests.base_component(wanted, model))
    elif not holds(found["Specification"], specification):
        change = {"InferenceComponentName": name, "Specification": specification}
        aws.change("sagemaker", "UpdateInferenceComponent", change)
    logs = waiting.component_logs(name)
    now = waiting.in_service(aws, lambda: components.look(aws, name), components.STATUS, f"base {name}", logs)
    copies = (found or {}).get("RuntimeConfig", {}).get("DesiredCopyCount", wanted.copies)
    if copies != wanted.copies and scaling.target(aws, name) is None:
        scaling.set_copies(aws, name, wanted.copies)
    elif now and copies != wanted.copies:
        console.say(f"base {name}: {copies} copies, as autoscaling wants; {wanted.copies} in the plan")


def generated(aws: Aws, kind: str, endpoint_name: str) -> Iterator[str]:
    """Names of the models or configurations that were made for an endpoint."""
    key = f"{kind}s"
    for item in aws.pages("sagemaker", f"List{kind}s", key, NameContains=endpoint_name):
        if re.fullmatch(re.escape(endpoint_name) + "-[0-9a-f]{8}", item[f"{kind}Name"]):
            yield item[f"{kind}Name"]


def _remove_old(aws: Aws, name: str, model: str, config: str) -> None:
    for kind, kept in (("EndpointConfig", config), ("Model", model)):
        for old in generated(aws, kind, name):
            if old != kept:
                aws.remove("sagemaker", f"Delete{kind}", **{f"{kind}Name": old})
                console.say(f"{kind} {old}: deleted, replaced by {kept}")
