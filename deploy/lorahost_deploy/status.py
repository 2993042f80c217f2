"""`lorahost deploy status`: everything of an endpoint in one table."""

from __future__ import annotations

import json
from typing import Any

import click

from lorahost_deploy import components, console, scaling
from lorahost_deploy.adapter import version_of
from lorahost_deploy.aws import Aws
from lorahost_deploy.endpoint import generated
from lorahost_deploy.options import endpoint_option, verb
from lorahost_deploy.plan import base_of

Row = dict[str, Any]


@click.command("status")
@endpoint_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@verb
def status(aws: Aws, endpoint: str, as_json: bool) -> None:
    """Show endpoint, base model, adapters and autoscaling."""
    rows = collect(aws, endpoint)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    columns = ("kind", "name", "status", "size", "detail")
    click.echo(console.table(columns, [tuple(row[c] for c in columns) for row in rows]))


def collect(aws: Aws, endpoint: str) -> list[Row]:
    """One row for each thing that there is."""
    rows = [_row("model", name) for name in generated(aws, "Model", endpoint)]
    rows += [_row("configuration", name) for name in generated(aws, "EndpointConfig", endpoint)]
    found = aws.find("sagemaker", "DescribeEndpoint", EndpointName=endpoint)
    if found:
        variants = found.get("ProductionVariants", [])
        size = ", ".join(f"{v.get('CurrentInstanceCount', '?')} instance(s)" for v in variants)
        rows.append(_row("endpoint", endpoint, found["EndpointStatus"], size, found.get("FailureReason", "")))
    for component in components.of_endpoint(aws, endpoint):
        rows.append(_component(component))
    base = base_of(endpoint)
    if limits := scaling.target(aws, base):
        size = f"{limits['MinCapacity']} to {limits['MaxCapacity']} copies"
        policies = ", ".join(sorted(scaling.policies(aws, base)))
        rows.append(_row("autoscaling", base, "", size, policies))
    if alarm := scaling.alarm(aws, base):
        rows.append(_row("alarm", alarm["AlarmName"], alarm.get("StateValue", "")))
    return rows


def _component(component: dict[str, Any]) -> Row:
    name, state = component["InferenceComponentName"], component[components.STATUS]
    reason = component.get("FailureReason", "")
    if components.base_name(component):
        version = version_of(components.artifact_url(component))
        return _row("adapter", name, state, "", f"{version} {reason}".strip())
    copies = component.get("RuntimeConfig", {})
    size = f"{copies.get('CurrentCopyCount', '?')} of {copies.get('DesiredCopyCount', '?')} copies"
    model = component["Specification"].get("ModelName", "")
    return _row("base", name, state, size, f"{model} {reason}".strip())


def _row(kind: str, name: str, state: str = "", size: str = "", detail: str = "") -> Row:
    return {"kind": kind, "name": name, "status": state, "size": size, "detail": detail}
