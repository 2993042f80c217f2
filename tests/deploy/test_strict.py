"""Requests against the whole of botocore's model, where botocore itself looks only at names, types and minima."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.validate import ParamValidator

import lorahost_deploy
from lorahost_deploy.aws import Aws
from lorahost_deploy.strict import StrictError, check, compiled

SOURCE = Path(lorahost_deploy.__file__).parent
CALLS = {"change", "find", "read", "remove", "pages"}
# operations that the code names in other ways than by two literals
NAMED_OTHERWISE = [
    *(
        ("sagemaker", f"{verb}{kind}")
        for verb in ("Create", "Describe", "Delete")
        for kind in ("Model", "EndpointConfig")
    ),
    *(("sagemaker", f"List{kind}s") for kind in ("Model", "EndpointConfig")),
    ("sagemaker-runtime", "InvokeEndpoint"),
    ("sagemaker-runtime", "InvokeEndpointWithResponseStream"),
]


def literal_calls() -> Iterator[tuple[str, str]]:
    """Service and operation of every `aws.find("service", "Operation", ...)` in the package."""
    names = {"SERVICE": "application-autoscaling"}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CALLS:
                words = [names.get(getattr(a, "id", ""), getattr(a, "value", None)) for a in node.args[:2]]
                if len(words) == 2 and all(isinstance(word, str) for word in words):
                    yield words[0], words[1]


OPERATIONS = sorted({*literal_calls(), *NAMED_OTHERWISE})


def model(service: str, operation: str) -> Any:
    client = boto3.client(service, region_name="eu-west-1", endpoint_url="http://unused")
    return client.meta.service_model.operation_model(operation)


def patterns(shape: Any, seen: set[str]) -> Iterator[str]:
    if shape is None or shape.name in seen:
        return
    seen.add(shape.name)
    if pattern := shape.metadata.get("pattern"):
        yield pattern
    if shape.type_name == "structure":
        for member in shape.members.values():
            yield from patterns(member, seen)
    elif shape.type_name == "list":
        yield from patterns(shape.member, seen)
    elif shape.type_name == "map":
        yield from patterns(shape.key, seen)
        yield from patterns(shape.value, seen)


def test_every_operation_of_the_code_exists_and_its_patterns_can_be_read() -> None:
    assert len(OPERATIONS) > 40
    for service, operation in OPERATIONS:
        for pattern in patterns(model(service, operation).input_shape, set()):
            compiled(pattern)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (r"([\p{L}\p{Z}\p{N}_.:/=+\-@]*)", "Größe 7 名:x", "a;b"),
        (r"\p{ASCII}*", "plain", "ü"),
        (r"\A\S[\p{Print}]*\z", "a b", " a"),
        (r"[\u0020-\uD7FF\uE000-\uFFFD\uD800\uDC00-\uDBFF\uDFFF\t]*", "a🙂\t", "\x00"),
        (r"[\w-_]*", "a-_", "a b"),
    ],
)
def test_javas_patterns_mean_the_same(pattern: str, yes: str, no: str) -> None:
    assert compiled(pattern).fullmatch(yes)
    assert not compiled(pattern).fullmatch(no)


def component(**changes: Any) -> dict[str, Any]:
    container = {"ArtifactUrl": "s3://b/a.tar.gz"}
    specification = {"BaseInferenceComponentName": "base", "Container": container}
    return {"InferenceComponentName": "a", "EndpointName": "e", "Specification": specification, **changes}


def test_a_right_request_passes() -> None:
    check(model("sagemaker", "CreateInferenceComponent"), component())


@pytest.mark.parametrize(
    ("changes", "said", "botocore_sees_it"),
    [
        ({"InferenceComponentName": "x" * 64}, "InferenceComponentName has 64 characters; the most is 63", False),
        ({"InferenceComponentName": "a_b"}, "InferenceComponentName is 'a_b'; it must match", False),
        ({"RuntimeConfig": {"CopyCount": -1}}, "RuntimeConfig.CopyCount is -1; the least is 0", True),
        ({"RuntimeConfig": {"CopyCount": True}}, "RuntimeConfig.CopyCount must be an integer (got bool)", False),
        ({"Tags": [{"Key": "k", "Value": "v"}] * 51}, "Tags has 51 members; the most is 50", False),
        ({"Tags": [{"Key": "k", "Value": "semi;colon"}]}, "Tags[0].Value is 'semi;colon'; it must match", False),
        ({"Extra": 1}, "Extra is no member of CreateInferenceComponentInput", True),
        ({"EndpointName": None}, "EndpointName is missing", True),
        ({"VariantName": None}, "VariantName is null; leave it out", True),
        ({"Specification": "text"}, "Specification must be an object (got str)", True),
        ({"Specification": {"Container": {"ArtifactUrl": "http://b/a"}}}, "Specification.Container.ArtifactUrl", False),
        (
            {"Specification": {"SchedulingConfig": {"PlacementStrategy": "PILE"}}},
            "Specification.SchedulingConfig.PlacementStrategy is 'PILE'; it must be one of SPREAD, BINPACK",
            False,
        ),
    ],
)
def test_a_wrong_request_is_refused_and_the_member_named(
    changes: dict[str, Any], said: str, botocore_sees_it: bool
) -> None:
    wanted = model("sagemaker", "CreateInferenceComponent")
    with pytest.raises(StrictError, match=re.escape(said)):
        check(wanted, component(**changes))
    assert ParamValidator().validate(component(**changes), wanted.input_shape).has_errors() == botocore_sees_it


def test_real_calls_are_checked_too() -> None:
    """Nothing listens there: the request does not get that far."""
    aws = Aws(region="eu-west-1", endpoint_url="http://127.0.0.1:9")
    with pytest.raises(StrictError, match="the most is 63"):
        aws.client("sagemaker").create_inference_component(**component(InferenceComponentName="x" * 64))
