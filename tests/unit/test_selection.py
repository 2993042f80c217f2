"""Which adapter answers: the order of the places that can name one; no name is ever swapped for another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorahost.errors import AdapterNotFoundError, HostError, InvalidRequestError
from lorahost.requests.attributes import Attributes
from lorahost.requests.headers import ADAPTER_ALIAS, ADAPTER_IDENTIFIER
from lorahost.requests.selection import Choice, choose


@dataclass
class Names:
    base_name: str = "qwen"
    adapters: dict[str, str] = field(default_factory=lambda: {"tax": "tax", "law": "law", "Tax advice": "tax"})

    def resolve(self, name: str) -> str | None:
        return self.adapters.get(name)

    def is_base(self, name: str) -> bool:
        return name in (self.base_name, "lmi")


CATALOG = Names()


def pick(
    headers: dict[str, str] | None = None,
    query: dict[str, str] | None = None,
    body: dict[str, Any] | None = None,
    attribute: str | None = None,
    **options: Any,
) -> Choice:
    return choose(headers or {}, query or {}, body or {}, Attributes(adapter=attribute), CATALOG, **options)


@pytest.mark.parametrize("name", [ADAPTER_IDENTIFIER, ADAPTER_IDENTIFIER.lower(), ADAPTER_IDENTIFIER.upper()])
def test_the_header_decides_in_any_case(name: str) -> None:
    choice = pick({name: "tax", ADAPTER_ALIAS.lower(): "Tax advice"}, body={"prompt": "x"})
    assert choice == Choice("tax", "header", "Tax advice", ())


def test_each_place_wins_over_those_below_it() -> None:
    places: list[tuple[str, dict[str, Any]]] = [
        ("header", {"headers": {ADAPTER_IDENTIFIER: "tax"}}),
        ("attributes", {"attribute": "tax"}),
        ("query", {"query": {"adapter": "tax"}}),
        ("body", {"body": {"adapter_id": "tax", "model": "law"}}),
    ]
    below: list[dict[str, Any]] = [
        {"attribute": "law"},
        {"query": {"adapter": "law"}},
        {"body": {"adapter_id": "law"}},
        {},
    ]
    for i, (source, place) in enumerate(places):
        given_names: dict[str, Any] = {}
        for lower in below[i:]:
            given_names |= lower
        choice = pick(**(given_names | place))
        assert (choice.name, choice.source) == ("tax", source)
        assert choice.warnings
        assert all("'law', overruled by" in warning for warning in choice.warnings)


@pytest.mark.parametrize(
    "body",
    [
        {"adapters": "tax"},
        {"adapters": ["tax"], "inputs": "x"},
        {"adapters": ["tax", "tax"], "inputs": ["x", "y"]},
        {"adapters": ["tax"], "prompt": [1, 2, 3]},
        {"adapter_id": "Tax advice"},
        {"parameters": {"adapter_id": "tax"}},
        {"adapter_id": "tax", "adapters": "tax"},
    ],
)
def test_all_body_fields(body: dict[str, Any]) -> None:
    assert pick(body=body) == Choice("tax", "body")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"adapters": ["tax", "law"], "inputs": ["x", "y"]}, "mixed_adapters"),
        ({"adapters": ["tax"], "inputs": ["x", "y"]}, "adapters_length_mismatch"),
        ({"adapters": [], "inputs": "x"}, "adapters_length_mismatch"),
        ({"adapters": [None], "inputs": "x"}, "invalid_type"),
        ({"adapters": {"a": 1}}, "invalid_type"),
        ({"adapter_id": 7}, "invalid_type"),
        ({"model": ["tax"]}, "invalid_type"),
        ({"adapter_id": "tax", "parameters": {"adapter_id": "law"}}, "conflicting_adapters"),
        ({"adapter_id": "tax", "adapters": ""}, "conflicting_adapters"),
    ],
)
def test_bad_body_fields(body: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        pick(body=body)
    assert caught.value.code == code
    assert caught.value.param is not None
    assert caught.value.param.split("[")[0] in caught.value.message


@pytest.mark.parametrize(
    ("model", "name", "source"),
    [
        ("tax", "tax", "model"),
        ("Tax advice", "tax", "model"),
        ("qwen", None, "model"),
        ("lmi", None, "model"),
        ("", None, "model"),
        (None, None, "default"),
    ],
)
def test_model(model: str | None, name: str | None, source: str) -> None:
    choice = pick(body={"model": model})
    assert (choice.name, choice.source) == (name, source)


def test_unknown_model_is_an_error_unless_told_otherwise() -> None:
    with pytest.raises(AdapterNotFoundError, match="'my-endpoint'") as caught:
        pick(body={"model": "my-endpoint"})
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")
    lenient = pick(body={"model": "my-endpoint"}, unknown_model="base")
    assert (lenient.name, lenient.source) == (None, "default")
    assert "'my-endpoint' is unknown" in lenient.warnings[0]


def test_a_header_makes_an_unknown_or_base_model_harmless() -> None:
    for model in ("my-endpoint", "qwen"):
        assert pick({ADAPTER_IDENTIFIER: "tax"}, body={"model": model}) == Choice("tax", "header")


def test_an_unknown_header_names_the_alias() -> None:
    with pytest.raises(AdapterNotFoundError) as caught:
        pick({ADAPTER_IDENTIFIER: "x-91", ADAPTER_ALIAS: "Gone"}, body={"adapter_id": "tax"})
    assert "'Gone' ('x-91')" in caught.value.message
    assert caught.value.body()["error"]["adapter"] == "x-91"
    assert caught.value.body()["error"]["alias"] == "Gone"


@pytest.mark.parametrize("blank", ["", "  "])
def test_blank_header_attribute_and_query_are_absent(blank: str) -> None:
    choice = pick({ADAPTER_IDENTIFIER: blank}, {"adapter": blank}, {"adapter_id": "tax"})
    assert choice == Choice("tax", "body")


def test_the_base_can_be_named_and_wins_where_it_is() -> None:
    assert pick({ADAPTER_IDENTIFIER: "qwen"}).name is None
    choice = pick(body={"adapters": "", "model": "tax"})
    assert (choice.name, choice.source) == (None, "body")
    assert "body model names 'tax'" in choice.warnings[0]


def test_agreeing_names_do_not_warn() -> None:
    body = {"adapter_id": "Tax advice", "model": "tax"}
    assert pick({ADAPTER_IDENTIFIER: "tax"}, {"adapter": "tax"}, body, "Tax advice").warnings == ()


def test_an_unknown_name_that_is_overruled_warns() -> None:
    assert "'nobody'" in pick({ADAPTER_IDENTIFIER: "tax"}, body={"adapter_id": "nobody"}).warnings[0]
    assert "'nobody'" in pick({ADAPTER_IDENTIFIER: "qwen"}, body={"adapter_id": "nobody"}).warnings[0]


NAMES = st.sampled_from(["tax", "law", "Tax advice", "qwen", "lmi", "nobody", "", " ", "TAX"])
MAYBE = st.none() | NAMES


@given(MAYBE, MAYBE, MAYBE, MAYBE, MAYBE, MAYBE, MAYBE)
def test_a_name_is_answered_by_its_owner_or_not_at_all(
    header: str | None,
    attribute: str | None,
    query: str | None,
    adapters: str | None,
    adapter_id: str | None,
    nested: str | None,
    model: str | None,
) -> None:
    body = {
        "adapters": adapters,
        "adapter_id": adapter_id,
        "parameters": {"adapter_id": nested},
        "model": model,
    }
    order = [header, attribute, query, adapters, adapter_id, nested, model]
    # "" counts as absent in the first three places, and as the base in the body.
    deciding = next(
        (name.strip() for i, name in enumerate(order) if name is not None and (i > 2 or name.strip())), None
    )
    headers = {} if header is None else {ADAPTER_IDENTIFIER: header}
    try:
        choice = pick(headers, {} if query is None else {"adapter": query}, body, (attribute or "").strip() or None)
    except HostError:
        return
    if deciding is None or deciding in ("", "qwen", "lmi"):
        assert choice.name is None
    else:
        assert choice.name == CATALOG.adapters[deciding]
