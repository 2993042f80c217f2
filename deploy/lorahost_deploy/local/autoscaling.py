"""Application Auto Scaling for copies of inference components, as far as deployment uses it.

Limits and the step from zero copies act; target tracking is kept and described, but follows no metric.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from lorahost_deploy.local.copies import Copies
from lorahost_deploy.local.failures import ApiError
from lorahost_deploy.local.state import ACCOUNT, Json, World
from lorahost_deploy.scaling import DIMENSION

NO_CAPACITY = "NoCapacityInvocationFailures"
KEPT = (
    "PolicyName",
    "ServiceNamespace",
    "ResourceId",
    "ScalableDimension",
    "PolicyType",
    "StepScalingPolicyConfiguration",
    "TargetTrackingScalingPolicyConfiguration",
)


class Autoscaling:
    """One method for each operation, named like it in snake case; takes and returns the operation's JSON."""

    def __init__(self, world: World, copies: Copies) -> None:
        self._world = world
        self._copies = copies

    def register_scalable_target(self, request: Json) -> Json:
        name = self._base(request)
        known = self._world.targets.get(name)
        if known is None and not {"MinCapacity", "MaxCapacity"} <= request.keys():
            raise ApiError("ValidationException", "MinCapacity and MaxCapacity must be set for a new scalable target.")
        limits: Json = {**(known or {}), **{k: request[k] for k in ("MinCapacity", "MaxCapacity") if k in request}}
        if limits["MinCapacity"] > limits["MaxCapacity"]:
            raise ApiError("ValidationException", "Maximum capacity cannot be less than minimum capacity")
        self._world.targets[name] = limits
        component = self._world.component(name)
        inside = min(max(component.copies, limits["MinCapacity"]), limits["MaxCapacity"])
        if inside != component.copies and component.status == "InService":
            self._copies.set_count(component, inside)
        return {}

    def describe_scalable_targets(self, request: Json) -> Json:
        wanted = request.get("ResourceIds")
        found = [
            {
                "ServiceNamespace": "sagemaker",
                "ResourceId": f"inference-component/{name}",
                "ScalableDimension": DIMENSION,
                "RoleARN": f"arn:aws:iam::{ACCOUNT}:role/aws-service-role/autoscaling",
                "CreationTime": time.time(),
                **limits,
            }
            for name, limits in sorted(self._world.targets.items())
            if wanted is None or f"inference-component/{name}" in wanted
        ]
        return {"ScalableTargets": found}

    def deregister_scalable_target(self, request: Json) -> Json:
        name = self._target(request)
        del self._world.targets[name]
        for key in [key for key in self._world.policies if key[0] == name]:
            del self._world.policies[key]
        return {}

    def put_scaling_policy(self, request: Json) -> Json:
        name = self._target(request)
        key = (name, request["PolicyName"])
        where = f"resource/{request['ResourceId']}:policyName/{request['PolicyName']}"
        owner = f"arn:aws:autoscaling:{self._world.region}:{ACCOUNT}:scalingPolicy"
        arn = self._world.policies.get(key, {}).get("PolicyARN") or f"{owner}:{uuid.uuid4()}:{where}"
        kept = {field: request[field] for field in KEPT if field in request}
        self._world.policies[key] = {**kept, "PolicyARN": arn, "CreationTime": time.time()}
        return {"PolicyARN": arn, "Alarms": []}

    def describe_scaling_policies(self, request: Json) -> Json:
        resource = request.get("ResourceId")
        found = [policy for _, policy in sorted(self._world.policies.items())]
        return {"ScalingPolicies": [p for p in found if resource is None or p["ResourceId"] == resource]}

    def delete_scaling_policy(self, request: Json) -> Json:
        key = (request["ResourceId"].partition("/")[2], request["PolicyName"])
        if key not in self._world.policies:
            raise ApiError("ObjectNotFoundException", f"No scaling policy found for {request['ResourceId']}.")
        del self._world.policies[key]
        return {}

    def no_capacity(self, base: str, invoked: str) -> None:
        """A request found no copy: counts it, and runs the step policy of an alarm that watches for it."""
        cloudwatch = self._world.aws("cloudwatch")
        for name in {base, invoked}:
            dimension = [{"Name": "InferenceComponentName", "Value": name}]
            data = [{"MetricName": NO_CAPACITY, "Dimensions": dimension, "Value": 1.0}]
            cloudwatch.put_metric_data(Namespace="AWS/SageMaker", MetricData=data)
        for alarm in cloudwatch.describe_alarms()["MetricAlarms"]:
            if self._watches(alarm, base):
                self._step(base, alarm["AlarmActions"])

    @staticmethod
    def _watches(alarm: dict[str, Any], base: str) -> bool:
        dimensions = {d["Name"]: d["Value"] for d in alarm["Dimensions"]}
        where = (alarm["Namespace"], alarm["MetricName"], dimensions)
        return where == ("AWS/SageMaker", NO_CAPACITY, {"InferenceComponentName": base}) and alarm["Threshold"] <= 1

    def _step(self, base: str, actions: list[str]) -> None:
        component, limits = self._world.component(base), self._world.targets.get(base)
        for (name, _), policy in self._world.policies.items():
            if name == base and policy["PolicyARN"] in actions and limits and component.status == "InService":
                change = policy["StepScalingPolicyConfiguration"]["StepAdjustments"][0]["ScalingAdjustment"]
                self._copies.set_count(component, min(component.copies + change, limits["MaxCapacity"]))

    def _base(self, request: Json) -> str:
        kind, _, name = request["ResourceId"].partition("/")
        if kind != "inference-component" or request["ScalableDimension"] != DIMENSION:
            raise ApiError("ValidationException", "lorahost local-aws scales copies of inference components only.")
        if name not in self._world.components or self._world.components[name].base:
            raise ApiError("ValidationException", f"Inference component {name} could not be found or is an adapter.")
        return str(name)

    def _target(self, request: Json) -> str:
        name = str(request["ResourceId"].partition("/")[2])
        if name not in self._world.targets:
            raise ApiError(
                "ObjectNotFoundException",
                "No scalable target registered for service namespace: sagemaker, resource ID: "
                f"{request['ResourceId']}, scalable dimension: {DIMENSION}",
            )
        return name
