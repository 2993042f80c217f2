"""Inference components: looking at them, creating, changing and deleting them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lorahost_deploy import console, requests, waiting
from lorahost_deploy.aws import Aws
from lorahost_deploy.errors import DeployError

STATUS = "InferenceComponentStatus"
Component = dict[str, Any]


def look(aws: Aws, name: str) -> Component | None:
    """A component's description; None when there is none."""
    return aws.find("sagemaker", "DescribeInferenceComponent", InferenceComponentName=name)


def of_endpoint(aws: Aws, endpoint: str) -> Iterator[Component]:
    """Descriptions of an endpoint's components, by name."""
    listed = aws.pages("sagemaker", "ListInferenceComponents", "InferenceComponents", EndpointNameEquals=endpoint)
    for name in sorted(item["InferenceComponentName"] for item in listed):
        if found := look(aws, name):
            yield found


def base_name(component: Component) -> str:
    """The base component of an adapter; empty for a base."""
    return str(component["Specification"].get("BaseInferenceComponentName", ""))


def adapters_of(aws: Aws, endpoint: str, base: str) -> dict[str, Component]:
    """The adapters on a base component, by name."""
    return {c["InferenceComponentName"]: c for c in of_endpoint(aws, endpoint) if base_name(c) == base}


def artifact_url(component: Component) -> str:
    """Where an adapter's archive is."""
    return str(component["Specification"].get("Container", {}).get("ArtifactUrl", ""))


def settled(aws: Aws, name: str) -> Component | None:
    """A component once it changes no more by itself, as an interrupted run may have left it."""
    return waiting.settled(aws, lambda: look(aws, name), STATUS, f"component {name}", 7200.0)


def start_adapter(aws: Aws, name: str, endpoint: str, base: str, url: str) -> bool:
    """Brings an adapter's component on its way to `url`; false when it is there already.

    A failed one is deleted first: SageMaker takes no update of it.

    Raises:
        DeployError: a component of that name is none of this base's adapters.
    """
    found = settled(aws, name)
    if found is not None and (base_name(found) != base or found["EndpointName"] != endpoint):
        where = f"on endpoint {found['EndpointName']}, base {base_name(found) or 'none'}"
        raise DeployError(f"component {name} exists {where}; names are unique in the account, take another one")
    if found is not None and found[STATUS] == "Failed":
        console.say(f"adapter {name}: failed before ({found.get('FailureReason', '')}), created anew")
        delete(aws, name, f"adapter {name}")
        found = None
    if found is None:
        aws.change("sagemaker", "CreateInferenceComponent", requests.adapter_component(name, endpoint, base, url))
    elif artifact_url(found) == url:
        return False
    else:
        aws.change("sagemaker", "UpdateInferenceComponent", requests.adapter_update(name, url))
    return True


def finish_adapter(aws: Aws, name: str, base: str, url: str) -> None:
    """Waits until an adapter's component serves `url`.

    Raises:
        DeployError: it failed, or SageMaker went back to the version before.
    """
    logs = waiting.component_logs(base)
    found = waiting.in_service(aws, lambda: look(aws, name), STATUS, f"adapter {name}", logs)
    if found and artifact_url(found) != url:
        reason = found.get("FailureReason") or "SageMaker gave no reason"
        raise DeployError(f"adapter {name}: SageMaker went back to {artifact_url(found)}: {reason}\nlog group: {logs}")


def delete(aws: Aws, name: str, what: str) -> None:
    """Deletes a component and waits until it is gone; what is gone already is fine."""
    start_delete(aws, name)
    finish_delete(aws, name, what)


def start_delete(aws: Aws, name: str) -> None:
    """Starts the deletion unless it runs already."""
    found = look(aws, name)
    if found is not None and found[STATUS] != "Deleting":
        settled(aws, name)
        aws.remove("sagemaker", "DeleteInferenceComponent", InferenceComponentName=name)


def finish_delete(aws: Aws, name: str, what: str) -> None:
    """Waits until a component is gone."""
    waiting.gone(aws, lambda: look(aws, name), STATUS, what)
