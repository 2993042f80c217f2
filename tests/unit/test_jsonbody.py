"""Request bodies: media types, charsets, and JSON that is not quite JSON."""

from __future__ import annotations

import json

import pytest

from lorahost.errors import InvalidRequestError
from lorahost.requests.jsonbody import MAX_DEPTH, read_object

LMI = {"inputs": "Once"}


def refusal(body: bytes, content_type: str | None = None) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        read_object(body, content_type)
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "",
        "application/json",
        "Application/JSON; charset=UTF-8",
        'text/plain; charset="utf8"',
        "application/jsonlines",
        "application/x-www-form-urlencoded",
    ],
)
def test_content_types_accepted(content_type: str | None) -> None:
    assert read_object(json.dumps(LMI).encode(), content_type) == LMI


@pytest.mark.parametrize(
    ("content_type", "said"),
    [
        ("text/csv", "'text/csv'"),
        ("multipart/form-data; boundary=x", "application/json"),
        ("application/json; charset=shift_jis", "'shift_jis'"),
        ("application/json; charset=", "''"),
    ],
)
def test_content_types_refused(content_type: str, said: str) -> None:
    error = refusal(json.dumps(LMI).encode(), content_type)
    assert (error.status, error.param) == (415, "Content-Type")
    assert said in error.message


def test_charsets() -> None:
    text = '{"inputs":"größe"}'
    assert read_object(text.encode("latin-1"), "application/json; charset=iso-8859-1") == {"inputs": "größe"}
    assert read_object(b"\xef\xbb\xbf" + text.encode(), None) == {"inputs": "größe"}
    error = refusal(text.encode("latin-1"))
    assert (error.code, error.details["position"]) == ("invalid_encoding", 13)
    assert "0xf6" in error.message


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (b"", "empty_body", "empty"),
        (b" \n", "empty_body", "empty"),
        (b'{"inputs":\n "x",}', "malformed_json", "line 2 column 6"),
        (b'{"inputs": "x"} {}', "malformed_json", "column 17"),
        (b'{"inputs": "x"', "malformed_json", "character 14"),
        (b"[1]", "not_an_object", "list [1]"),
        (b'"x"', "not_an_object", "str 'x'"),
        (b"null", "not_an_object", "NoneType"),
        (b'{"inputs": "x", "a": NaN}', "malformed_json", "NaN"),
        (b'{"inputs": "x", "a": [-Infinity]}', "malformed_json", "-Infinity"),
        (b'{"inputs": "x", "a": 1e999}', "number_out_of_range", "1e999"),
        (
            b'{"inputs": "x", "a": ' + b"9" * 5000 + b"}",
            "number_out_of_range",
            "more than 4300 digits",
        ),
        (b'{"inputs": "x", "inputs": "y"}', "duplicate_key", "'inputs' appears twice"),
        (b'{"inputs": "x", "p": {"a": 1, "b": 2, "a": 3}}', "duplicate_key", "'a' appears twice"),
        (b'{"inputs": "\\ud83d"}', "invalid_encoding", "surrogate"),
        (b'{"inputs": ' + b"[" * 100_000, "nested_too_deeply", "200"),
        (b'{"inputs": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "nested_too_deeply", "200"),
    ],
)
def test_bad_json(body: bytes, code: str, said: str) -> None:
    error = refusal(body)
    assert (error.status, error.code) == (400, code)
    assert said in error.message


def test_what_is_just_good_enough() -> None:
    deep = b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1)
    assert json.dumps(read_object(b'{"prompt": ' + deep + b"}", None)).encode() == b'{"prompt": ' + deep + b"}"
    wide = {"prompt": [[1, 2]] * 1000}
    assert read_object(json.dumps(wide).encode(), None) == wide
    assert read_object(b'{"inputs": "\\ud83d\\ude00 \\u00e9"}', None) == {"inputs": "😀 é"}
