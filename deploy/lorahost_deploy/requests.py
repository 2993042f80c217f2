"""The SageMaker requests of an endpoint, from its plan; pure functions."""

from __future__ import annotations

from typing import Any

from lorahost_deploy.compare import named
from lorahost_deploy.errors import DeployError
from lorahost_deploy.plan import VARIANT, Plan

ENVIRONMENT_BYTES = 32768
TAG = "lorahost:endpoint"


def model(plan: Plan, role_arn: str, model_url: str) -> dict[str, Any]:
    """CreateModel; its name holds a digest of the rest, since models can't be changed.

    Raises:
        DeployError: the environment is larger than SageMaker takes; botocore's model has no such limit.
    """
    size = sum(len(name.encode()) + len(value.encode()) for name, value in plan.environment.items())
    if size > ENVIRONMENT_BYTES:
        raise DeployError(f"environment: {size} bytes in all; SageMaker takes {ENVIRONMENT_BYTES}")
    source = {"S3Uri": model_url, "S3DataType": "S3Prefix", "CompressionType": "None"}
    container: dict[str, Any] = {"Image": plan.image, "ModelDataSource": {"S3DataSource": source}}
    if plan.environment:
        container["Environment"] = plan.environment
    request: dict[str, Any] = {"PrimaryContainer": container, "ExecutionRoleArn": role_arn, **_network(plan)}
    return {"ModelName": named(plan.endpoint, request), **request, "Tags": _tags(plan)}


def endpoint_config(plan: Plan, role_arn: str) -> dict[str, Any]:
    """CreateEndpointConfig; no model on the variant: inference components bring theirs."""
    variant: dict[str, Any] = {
        "VariantName": VARIANT,
        "InstanceType": plan.instance_type,
        "InitialInstanceCount": max(1, plan.min_instances),
        "InferenceAmiVersion": plan.ami_version,
        "ModelDataDownloadTimeoutInSeconds": plan.download_timeout_s,
        "ContainerStartupHealthCheckTimeoutInSeconds": plan.startup_timeout_s,
        "ManagedInstanceScaling": {
            "Status": "ENABLED",
            "MinInstanceCount": plan.min_instances,
            "MaxInstanceCount": max(plan.max_instances, plan.min_instances),
        },
        "RoutingConfig": {"RoutingStrategy": plan.routing},
    }
    if plan.volume_gb is not None:
        variant["VolumeSizeInGB"] = plan.volume_gb
    request: dict[str, Any] = {"ProductionVariants": [variant], "ExecutionRoleArn": role_arn, **_network(plan)}
    return {"EndpointConfigName": named(plan.endpoint, request), **request, "Tags": _tags(plan)}


def endpoint(plan: Plan, config: str) -> dict[str, Any]:
    """CreateEndpoint."""
    return {"EndpointName": plan.endpoint, "EndpointConfigName": config, "Tags": _tags(plan)}


def base_specification(plan: Plan, model_name: str) -> dict[str, Any]:
    """What a base inference component runs, and on how much of an instance."""
    compute: dict[str, Any] = {
        "NumberOfAcceleratorDevicesRequired": plan.accelerators,
        "MinMemoryRequiredInMb": plan.memory_mb,
    }
    if plan.cpus is not None:
        compute["NumberOfCpuCoresRequired"] = plan.cpus
    timeouts = {
        "ModelDataDownloadTimeoutInSeconds": plan.download_timeout_s,
        "ContainerStartupHealthCheckTimeoutInSeconds": plan.startup_timeout_s,
    }
    return {"ModelName": model_name, "StartupParameters": timeouts, "ComputeResourceRequirements": compute}


def base_component(plan: Plan, model_name: str) -> dict[str, Any]:
    """CreateInferenceComponent of the base model."""
    return {
        "InferenceComponentName": plan.base,
        "EndpointName": plan.endpoint,
        "VariantName": VARIANT,
        "Specification": base_specification(plan, model_name),
        "RuntimeConfig": {"CopyCount": plan.copies},
        "Tags": _tags(plan),
    }


def adapter_component(name: str, endpoint_name: str, base: str, artifact_url: str) -> dict[str, Any]:
    """CreateInferenceComponent of an adapter: it shares the base's resources and copies, so it names none."""
    return {
        "InferenceComponentName": name,
        "EndpointName": endpoint_name,
        "Specification": {"BaseInferenceComponentName": base, "Container": {"ArtifactUrl": artifact_url}},
    }


def adapter_update(name: str, artifact_url: str) -> dict[str, Any]:
    """UpdateInferenceComponent of an adapter."""
    return {"InferenceComponentName": name, "Specification": {"Container": {"ArtifactUrl": artifact_url}}}


def _network(plan: Plan) -> dict[str, Any]:
    """The same on model and configuration, or SageMaker refuses them."""
    found: dict[str, Any] = {"EnableNetworkIsolation": plan.network_isolation}
    if plan.subnets or plan.security_groups:
        found["VpcConfig"] = {"Subnets": plan.subnets, "SecurityGroupIds": plan.security_groups}
    return found


def _tags(plan: Plan) -> list[dict[str, str]]:
    return [{"Key": TAG, "Value": plan.endpoint}]
