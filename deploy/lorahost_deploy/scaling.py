"""Copies of a base component, and the autoscaling of them."""

from __future__ import annotations

from typing import Any

from lorahost_deploy import components, console, waiting
from lorahost_deploy.aws import Aws

DIMENSION = "sagemaker:inference-component:DesiredCopyCount"
NAMESPACE = "sagemaker"
METRIC = "SageMakerInferenceComponentConcurrentRequestsPerCopyHighResolution"
SERVICE = "application-autoscaling"


def resource(base: str) -> dict[str, str]:
    """What autoscaling calls a base component's copies."""
    return {
        "ServiceNamespace": NAMESPACE,
        "ResourceId": f"inference-component/{base}",
        "ScalableDimension": DIMENSION,
    }


def policy_names(base: str) -> tuple[str, str]:
    """Names of the target tracking policy and of the step policy from zero."""
    return f"{base}-concurrency", f"{base}-from-zero"


def alarm_name(base: str) -> str:
    """Name of the alarm that wakes a base component with no copies."""
    return f"lorahost-{base}-no-capacity"


def target(aws: Aws, base: str) -> dict[str, Any] | None:
    """The registered limits of a base component's copies."""
    asked = {"ServiceNamespace": NAMESPACE, "ResourceIds": [f"inference-component/{base}"]}
    answer = aws.find(SERVICE, "DescribeScalableTargets", **asked, ScalableDimension=DIMENSION)
    found: list[dict[str, Any]] = answer["ScalableTargets"] if answer else []
    return found[0] if found else None


def policies(aws: Aws, base: str) -> dict[str, dict[str, Any]]:
    """The scaling policies of a base component, by name."""
    found = aws.pages(SERVICE, "DescribeScalingPolicies", "ScalingPolicies", **resource(base))
    return {policy["PolicyName"]: policy for policy in found}


def alarm(aws: Aws, base: str) -> dict[str, Any] | None:
    """The alarm of a base component."""
    answer = aws.find("cloudwatch", "DescribeAlarms", AlarmNames=[alarm_name(base)])
    found: list[dict[str, Any]] = answer["MetricAlarms"] if answer else []
    return found[0] if found else None


def set_copies(aws: Aws, base: str, copies: int) -> None:
    """Sets the number of copies and waits for them."""
    change = {"InferenceComponentName": base, "DesiredRuntimeConfig": {"CopyCount": copies}}
    aws.change("sagemaker", "UpdateInferenceComponentRuntimeConfig", change)
    logs = waiting.component_logs(base)
    what = f"base {base}, {copies} copies"
    waiting.in_service(aws, lambda: components.look(aws, base), components.STATUS, what, logs)


def remove(aws: Aws, base: str) -> None:
    """Takes away alarm, policies and limits; the copies stay as they are."""
    if alarm(aws, base) is not None:
        aws.remove("cloudwatch", "DeleteAlarms", AlarmNames=[alarm_name(base)])
    for name in policies(aws, base):
        aws.remove(SERVICE, "DeleteScalingPolicy", PolicyName=name, **resource(base))
    if target(aws, base) is not None:
        aws.remove(SERVICE, "DeregisterScalableTarget", **resource(base))
        console.say(f"autoscaling of {base}: removed")
