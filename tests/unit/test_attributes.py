"""Custom attributes: reading what callers send, writing what proves who answered."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorahost.errors import HostError, InvalidRequestError
from lorahost.requests.attributes import INVOCATION_ROUTES, MAX_CHARS, Attributes, parse, render


@pytest.mark.parametrize("value", [None, "", " ", ";;", ","])
def test_nothing_given(value: str | None) -> None:
    found = parse(value)
    assert (found.adapter, found.route, found.deadline_s) == (None, None, None)


def test_semicolons_and_commas_separate_and_unknown_keys_stay() -> None:
    found = parse("trace-17; Adapter = tax ,route=/v1/completions;note=a,b;deadline_s=5")
    assert found == Attributes("tax", "/v1/completions", "5", {"trace-17": "", "note": "a,b"})


def test_an_empty_adapter_is_absent() -> None:
    assert parse("adapter=;x=1").adapter is None


@pytest.mark.parametrize("route", INVOCATION_ROUTES)
def test_own_routes_are_accepted(route: str) -> None:
    assert parse(f"route={route}").route == route


@pytest.mark.parametrize("route", ["/v1/embeddings", "/adapters", "/v1/completions/../../adapters", "v1/completions"])
def test_other_routes_are_refused_with_the_list(route: str) -> None:
    with pytest.raises(InvalidRequestError, match="/v1/chat/completions") as caught:
        parse(f"route={route}")
    assert (caught.value.status, caught.value.code) == (400, "unknown_route")
    assert repr(route) in caught.value.message


@pytest.mark.parametrize(
    ("value", "code", "said"),
    [
        ("a" * (MAX_CHARS + 1), "custom_attributes_too_long", "1025 characters; the limit is 1024"),
        ("adapter=t\tx", "custom_attributes_not_ascii", "printable ASCII"),
        ("adapter=größe", "custom_attributes_not_ascii", "printable ASCII"),
        ("adapter=a;ADAPTER=b", "conflicting_custom_attributes", "'a' and 'b'"),
    ],
)
def test_bad_headers(value: str, code: str, said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(value)
    assert caught.value.code == code
    assert said in caught.value.message


def test_the_longest_header_is_read() -> None:
    assert parse("adapter=" + "a" * (MAX_CHARS - 8)).adapter == "a" * (MAX_CHARS - 8)


def test_the_same_adapter_twice_is_one() -> None:
    assert parse("adapter=a;adapter=a").adapter == "a"


def test_rendering_an_adapter_and_the_base() -> None:
    assert render("tax-law", "0123456789abcdef") == "adapter=tax-law;version=0123456789ab"
    assert render(None, None) == "adapter=;version=base"
    assert render("a", "b" * 64, {"request_id": "r;1"}) == "adapter=a;version=bbbbbbbbbbbb;request_id=r%3B1"


def test_rendering_needs_a_digest_and_room() -> None:
    with pytest.raises(ValueError, match="together"):
        render("a", None)
    with pytest.raises(ValueError, match="1024"):
        render("é" * 200, "0" * 64)


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=70))
def test_what_is_rendered_is_safe_in_a_header_and_reads_back(name: str) -> None:
    value = render(name, "0123456789ab")
    assert value.isascii()
    assert value.isprintable()
    # Spaces at the ends are not part of a name: parse strips only unescaped ones.
    assert parse(value).adapter == name
    assert parse(value).extra == {"version": "0123456789ab"}


@given(st.text(max_size=1100))
def test_parse_raises_only_host_errors(value: str) -> None:
    with contextlib.suppress(HostError):
        parse(value)
