"""`lorahost deploy role`: the execution role and the build role, or a policy to give to people."""

from __future__ import annotations

import json
from typing import Any

import click

from lorahost_deploy import console
from lorahost_deploy.aws import Aws
from lorahost_deploy.options import verb
from lorahost_deploy.policies import BEDROCK_ROLE, BUILD_ROLE, EXECUTION_ROLE, compact, policy

ROLES = {EXECUTION_ROLE: "execution", BUILD_ROLE: "build", BEDROCK_ROLE: "bedrock"}
PRINTABLE = ["deployer", "invoker", "execution", "build", "bedrock"]


@click.command("role")
@click.option(
    "--store", required=True, help="s3://bucket/prefix of models and adapters; the roles may read only there."
)
@click.option("--print", "printed", type=click.Choice(PRINTABLE), help="Only print a policy.")
@click.option("--bedrock", is_flag=True, help="The role of Bedrock's model import, too.")
@verb
def role(aws: Aws, store: str, printed: str | None, bedrock: bool) -> None:
    """Create or update the roles that SageMaker and CodeBuild work with."""
    if printed:
        click.echo(json.dumps(policy(printed, aws, store), indent=2))
        return
    for name, kind in ROLES.items():
        if kind == "bedrock" and not bedrock:
            continue
        ensure(aws, name, policy(f"{kind}-trust", aws, store), policy(kind, aws, store))


def ensure(aws: Aws, name: str, trust: dict[str, Any], allowed: dict[str, Any]) -> None:
    """Creates the role, or changes what differs."""
    found = aws.find("iam", "GetRole", RoleName=name)
    if found is None:
        text = {"AssumeRolePolicyDocument": compact(trust), "Description": "lorahost"}
        aws.change("iam", "CreateRole", {"RoleName": name, **text})
        console.say(f"role {name}: created")
    elif found["Role"]["AssumeRolePolicyDocument"] != trust:
        aws.change("iam", "UpdateAssumeRolePolicy", {"RoleName": name, "PolicyDocument": compact(trust)})
        console.say(f"role {name}: trust policy updated")
    inline = aws.find("iam", "GetRolePolicy", RoleName=name, PolicyName=name)
    if inline is None or inline["PolicyDocument"] != allowed:
        aws.change("iam", "PutRolePolicy", {"RoleName": name, "PolicyName": name, "PolicyDocument": compact(allowed)})
        console.say(f"role {name}: policy put")


def remove(aws: Aws) -> None:
    """Deletes the roles."""
    for name in ROLES:
        if aws.find("iam", "GetRole", RoleName=name) is None:
            continue
        if aws.find("iam", "GetRolePolicy", RoleName=name, PolicyName=name) is not None:
            aws.remove("iam", "DeleteRolePolicy", RoleName=name, PolicyName=name)
        aws.remove("iam", "DeleteRole", RoleName=name)
        console.say(f"role {name}: deleted")
