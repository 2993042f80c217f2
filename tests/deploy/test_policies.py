"""The policies: small enough, filled in, and enough for what the code asks for."""

from __future__ import annotations

import json

import pytest

from lorahost_deploy import policies
from lorahost_deploy.aws import Aws
from lorahost_deploy.errors import action

from .conftest import Account
from .test_strict import OPERATIONS

# what the caller needs beside the operations that it names
NO_PERMISSION_NEEDED = {"sts:GetCallerIdentity"}
OTHER_NAMES = {"s3:DeleteObjects": "s3:DeleteObject"}
MANAGED_POLICY_CHARS = 6144


@pytest.fixture
def aws(account: Account) -> Aws:
    return Aws(region="eu-west-1", endpoint_url=account.local.url)


def test_all_policies_are_filled_in_and_fit(aws: Aws) -> None:
    assert policies.names() == [
        "bedrock",
        "bedrock-trust",
        "build",
        "build-trust",
        "deployer",
        "execution",
        "execution-trust",
        "invoker",
    ]
    for name in policies.names():
        text = policies.compact(policies.policy(name, aws, "s3://models/prefix"))
        assert "$" not in text
        assert len(text) <= MANAGED_POLICY_CHARS, name
        assert json.loads(text)["Version"] == "2012-10-17"


def test_the_deployer_may_do_what_the_verbs_do(aws: Aws) -> None:
    allowed = set()
    for statement in policies.policy("deployer", aws, "s3://models/prefix")["Statement"]:
        actions = statement["Action"]
        allowed |= {actions} if isinstance(actions, str) else set(actions)
    needed = {OTHER_NAMES.get(one, one) for one in (action(*operation) for operation in OPERATIONS)}
    assert needed - allowed - NO_PERMISSION_NEEDED == set()


def test_no_policy_allows_everything(aws: Aws) -> None:
    """A star stands only for what has no resource: sign-in, lists, metrics."""
    for name in policies.names():
        for statement in policies.policy(name, aws, "s3://models/prefix")["Statement"]:
            actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
            assert not [one for one in actions if "*" in one], name
            if statement.get("Resource") == "*":
                harmless = ("ecr:GetAuthorizationToken", "cloudwatch:PutMetricData")
                assert all(one in harmless or ":List" in one or ":Describe" in one for one in actions), name


def test_the_roles_read_only_the_store(aws: Aws) -> None:
    [read] = [
        s for s in policies.policy("execution", aws, "s3://models/a/b")["Statement"] if s["Action"] == "s3:GetObject"
    ]
    assert read["Resource"] == "arn:aws:s3:::models/a/b/*"
