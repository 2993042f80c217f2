"""Which model an id means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from lorahost.bedrock.model_ids import choose
from lorahost.errors import AdapterNotFoundError, HostError, InvalidRequestError

IMPORTED = "arn:aws:bedrock:us-east-1:123456789012:imported-model"


@dataclass
class Names:
    """Base `org/base:1` with adapters, one of them with an alias, one whose name has a slash."""

    base_name: str = "org/base:1"
    adapters: dict[str, str] = field(
        default_factory=lambda: {"a1": "a1", "team/a2": "team/a2", "nick": "a1", "with:colon": "with:colon"}
    )

    def resolve(self, name: str) -> str | None:
        return self.adapters.get(name)

    def is_base(self, name: str) -> bool:
        return name == self.base_name


@pytest.mark.parametrize(
    ("model_id", "name"),
    [
        ("org/base:1", None),
        ("a1", "a1"),
        ("nick", "a1"),
        ("team/a2", "team/a2"),
        ("with:colon", "with:colon"),
        ("org/base:1:a1", "a1"),
        ("org/base:1:nick", "a1"),
        ("org/base:1:team/a2", "team/a2"),
        (f"{IMPORTED}/a1", "a1"),
        (f"{IMPORTED}/team/a2", "team/a2"),
        (f"{IMPORTED}/with:colon", "with:colon"),
        (f"{IMPORTED}/org/base:1", None),
        (f"{IMPORTED}/org/base:1:a1", "a1"),
        ("arn:aws:bedrock:us-east-1:123456789012:custom-model/some.model/a1", "a1"),
        ("arn:aws:bedrock:us-east-1::foundation-model/nick", "a1"),
        ("arn:aws:sagemaker:eu-west-1:123456789012:inference-component/a1", "a1"),
    ],
)
def test_an_id_names_the_base_or_an_adapter(model_id: str, name: str | None) -> None:
    assert choose(model_id, {}, Names()).name == name


@pytest.mark.parametrize(
    "model_id",
    [
        "gone",
        "A1",
        " a1",
        "base",
        "org/base:1:",
        "org/base:1:gone",
        "other:a1",
        "org/base:1:org/base:1",
        "x/a1",
        "a1/",
        f"{IMPORTED}/gone",
        f"{IMPORTED}/",
        IMPORTED,
        "arn:a1",
        "arn:aws:bedrock:us-east-1:123456789012:a1",
        "arn:aws:bedrock:us-east-1:123456789012:imported-model/a1/gone",
        "\n",
        "a1\n",
    ],
)
def test_an_unknown_id_is_refused_and_never_another_model(model_id: str) -> None:
    with pytest.raises(HostError) as error:
        choose(model_id, {}, Names())
    expected = AdapterNotFoundError if model_id.strip() else InvalidRequestError
    assert isinstance(error.value, expected)


def test_a_huge_id_is_told_its_limit() -> None:
    with pytest.raises(InvalidRequestError, match=r"9999 characters; the limit is 2048"):
        choose("x" * 9999, {}, Names())


@pytest.mark.parametrize("body", [{}, {"model": "nick"}, {"adapters": "a1"}, {"model": None}, {"adapter_id": "a1"}])
def test_the_body_may_name_the_same_model(body: dict[str, Any]) -> None:
    assert choose("a1", body, Names()).name == "a1"


@pytest.mark.parametrize("body", [{"model": "team/a2"}, {"model": "org/base:1"}, {"adapters": "team/a2"}])
def test_a_body_that_names_another_model_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="modelId is 'a1'"):
        choose("a1", body, Names())


def test_a_body_that_names_an_unknown_model_is_refused() -> None:
    with pytest.raises(AdapterNotFoundError, match="gone"):
        choose("a1", {"model": "gone"}, Names())
