"""`lorahost deploy autoscale`: copies of the base model by concurrent requests, down to none if allowed."""

from __future__ import annotations

from typing import Any

import click

from lorahost_deploy import components, console, scaling
from lorahost_deploy.aws import Aws
from lorahost_deploy.compare import holds
from lorahost_deploy.errors import DeployError
from lorahost_deploy.options import endpoint_option, verb
from lorahost_deploy.plan import base_of
from lorahost_deploy.scaling import SERVICE

# Adding a copy takes minutes of download and start, removing one is instant and hard to undo.
OUT_COOLDOWN_S = 60
IN_COOLDOWN_S = 600
ALARM_PERIOD_S = 30


@click.command("autoscale")
@endpoint_option
@click.option("--min", "least", type=int, default=1, show_default=True, help="Copies at least; 0 scales to zero.")
@click.option("--max", "most", type=int, default=1, show_default=True, help="Copies at most.")
@click.option("--concurrency", type=float, default=32.0, show_default=True, help="Running requests wanted per copy.")
@click.option("--off", is_flag=True, help="Remove the autoscaling.")
@verb
def autoscale(aws: Aws, endpoint: str, least: int, most: int, concurrency: float, off: bool) -> None:
    """Scale the base model's copies; its adapters follow."""
    base = base_of(endpoint)
    if off:
        scaling.remove(aws, base)
        return
    if not 0 <= least <= most or most < 1:
        raise DeployError(f"--min {least} --max {most}: expected 0 <= min <= max and max >= 1")
    if components.look(aws, base) is None and not aws.offline:
        raise DeployError(f"there is no base component {base}: run `lorahost deploy endpoint` first")
    if least == 0:
        _needs_instances_from_zero(aws, endpoint)
    ensure(aws, base, least, most, concurrency)


def ensure(aws: Aws, base: str, least: int, most: int, concurrency: float) -> None:
    """Registers the limits and puts the policies; only what differs is changed."""
    limits = {"MinCapacity": least, "MaxCapacity": most}
    if not holds(scaling.target(aws, base), limits):
        aws.change(SERVICE, "RegisterScalableTarget", {**scaling.resource(base), **limits})
        console.say(f"{base}: {least} to {most} copies")
    there = scaling.policies(aws, base)
    tracking_name, step_name = scaling.policy_names(base)
    _put(aws, base, there, tracking_name, tracking(concurrency))
    if least == 0:
        step_arn = _put(aws, base, there, step_name, step())
        alarm = no_capacity_alarm(base, step_arn)
        if not holds(scaling.alarm(aws, base), alarm):
            aws.change("cloudwatch", "PutMetricAlarm", alarm)
            console.say(f"alarm {alarm['AlarmName']}: put")
        return
    if scaling.alarm(aws, base) is not None:
        aws.remove("cloudwatch", "DeleteAlarms", AlarmNames=[scaling.alarm_name(base)])
    if step_name in there:
        aws.remove(SERVICE, "DeleteScalingPolicy", PolicyName=step_name, **scaling.resource(base))


def tracking(concurrency: float) -> dict[str, Any]:
    """The policy that keeps running requests per copy at `concurrency`."""
    return {
        "PolicyType": "TargetTrackingScaling",
        "TargetTrackingScalingPolicyConfiguration": {
            "TargetValue": concurrency,
            "PredefinedMetricSpecification": {"PredefinedMetricType": scaling.METRIC},
            "ScaleOutCooldown": OUT_COOLDOWN_S,
            "ScaleInCooldown": IN_COOLDOWN_S,
        },
    }


def step() -> dict[str, Any]:
    """The policy that makes one copy out of none: target tracking sees no requests per copy without copies."""
    return {
        "PolicyType": "StepScaling",
        "StepScalingPolicyConfiguration": {
            "AdjustmentType": "ChangeInCapacity",
            "MetricAggregationType": "Maximum",
            "Cooldown": OUT_COOLDOWN_S,
            "StepAdjustments": [{"MetricIntervalLowerBound": 0.0, "ScalingAdjustment": 1}],
        },
    }


def no_capacity_alarm(base: str, policy_arn: str) -> dict[str, Any]:
    """The alarm that runs the step policy when a request finds no copy."""
    return {
        "AlarmName": scaling.alarm_name(base),
        "AlarmDescription": f"a request for {base} or one of its adapters found no copy",
        "AlarmActions": [policy_arn],
        "Namespace": "AWS/SageMaker",
        "MetricName": "NoCapacityInvocationFailures",
        "Dimensions": [{"Name": "InferenceComponentName", "Value": base}],
        "Statistic": "Maximum",
        "Period": ALARM_PERIOD_S,
        "EvaluationPeriods": 1,
        "DatapointsToAlarm": 1,
        "Threshold": 1.0,
        "ComparisonOperator": "GreaterThanOrEqualToThreshold",
        "TreatMissingData": "missing",
    }


def _put(aws: Aws, base: str, there: dict[str, dict[str, Any]], name: str, policy: dict[str, Any]) -> str:
    found = there.get(name)
    if found is not None and holds(found, policy):
        return str(found["PolicyARN"])
    unknown = "00000000-0000-0000-0000-000000000000"
    where = f"scalingPolicy:{unknown}:resource/sagemaker/inference-component/{base}:policyName/{name}"
    assumed = {"PolicyARN": f"arn:{aws.partition}:autoscaling:{aws.region}:{aws.account}:{where}"}
    change = {"PolicyName": name, **scaling.resource(base), **policy}
    answer = aws.change(SERVICE, "PutScalingPolicy", change, assumed)
    console.say(f"policy {name}: put")
    return str(answer["PolicyARN"])


def _needs_instances_from_zero(aws: Aws, endpoint: str) -> None:
    """An endpoint that keeps an instance never scales to zero; better said here than on the bill."""
    found = aws.find("sagemaker", "DescribeEndpoint", EndpointName=endpoint)
    if found is None:
        return
    config = aws.read("sagemaker", "DescribeEndpointConfig", EndpointConfigName=found["EndpointConfigName"])
    scaling_ = config["ProductionVariants"][0].get("ManagedInstanceScaling", {})
    if scaling_.get("MinInstanceCount", 1) != 0:
        count = scaling_.get("MinInstanceCount", 1)
        raise DeployError(
            f"--min 0, but endpoint {endpoint} keeps {count} instance(s): "
            "run `lorahost deploy endpoint` with --min-instances 0 first"
        )
