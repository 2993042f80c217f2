"""From the bytes of a request body to one JSON object, with every way to fail put into words."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from typing import Any

from lorahost.core import Json
from lorahost.requests.problems import invalid, shown

# The last one is what `curl -d` says unless told otherwise.
ACCEPTED_TYPES = ("application/json", "application/jsonlines", "text/plain", "application/x-www-form-urlencoded")
# What Python calls each accepted charset; utf-8-sig also reads UTF-8 without a byte order mark.
_CHARSETS = {"utf-8": "utf-8-sig", "utf8": "utf-8-sig", "us-ascii": "ascii", "iso-8859-1": "latin-1"}
# JSON schemas in tools are the deepest that real requests get, at a few dozen levels.
MAX_DEPTH = 200

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_object(body: bytes, content_type: str | None) -> Json:
    """The JSON object in `body`.

    A missing Content-Type is taken for JSON in UTF-8, as boto3 and plain sockets send none.

    Raises:
        InvalidRequestError: 415 for another media type or charset; 400 for wrong bytes, malformed JSON (with
            line and column), NaN or Infinity, numbers out of range, a duplicate key, lone surrogates, more
            than 200 levels, or a top level that is not an object.
    """
    text = _decoded(body, _charset(content_type))
    if not text.strip():
        raise invalid("the body is empty; it must be a JSON object", code="empty_body")
    data = _parsed(text)
    if not isinstance(data, dict):
        raise invalid(
            f"the body's top level is {type(data).__name__} {shown(data)}; it must be a JSON object",
            code="not_an_object",
        )
    if _SURROGATE.search(text):
        _refuse_lone_surrogates(data)
    return data


def _charset(content_type: str | None) -> str:
    if not (content_type or "").strip():
        return "utf-8-sig"
    media_type, *parameters = (part.strip() for part in (content_type or "").split(";"))
    if media_type.lower() not in ACCEPTED_TYPES:
        raise invalid(
            f"Content-Type is {shown(media_type)}; accepted are {', '.join(ACCEPTED_TYPES)}",
            param="Content-Type",
            code="unsupported_media_type",
            status=415,
            accepted=list(ACCEPTED_TYPES),
        )
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        charset = value.strip().strip('"').lower()
        if key.strip().lower() == "charset" and charset not in _CHARSETS:
            raise invalid(
                f"charset is {shown(charset)}; accepted are {', '.join(_CHARSETS)}",
                param="Content-Type",
                code="unsupported_charset",
                status=415,
            )
        if key.strip().lower() == "charset":
            return _CHARSETS[charset]
    return "utf-8-sig"


def _decoded(body: bytes, encoding: str) -> str:
    try:
        return body.decode(encoding)
    except UnicodeDecodeError as error:
        raise invalid(
            f"byte {error.start} of the body (0x{body[error.start]:02x}) is not valid {error.encoding}",
            code="invalid_encoding",
            position=error.start,
        ) from None


def _parsed(text: str) -> Any:
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise invalid(
            f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno} "
            f"(character {error.pos})",
            code="malformed_json",
            line=error.lineno,
            column=error.colno,
            position=error.pos,
        ) from None
    except ValueError:
        raise invalid(
            f"the body has an integer of more than {sys.get_int_max_str_digits()} digits", code="number_out_of_range"
        ) from None
    except RecursionError:
        raise _too_deep() from None
    # Fewer brackets than levels allowed: no need to look.
    brackets = text.count("[") + text.count("{")
    if brackets > MAX_DEPTH and isinstance(data, dict | list) and _deeper_than(data, MAX_DEPTH):
        raise _too_deep()
    return data


def _deeper_than(data: Any, limit: int) -> bool:
    level = [data]
    for _ in range(limit):
        children = (node.values() if type(node) is dict else node for node in level)
        level = [child for some in children for child in some if type(child) is list or type(child) is dict]
        if not level:
            return False
    return True


def _too_deep() -> Exception:
    return invalid(f"the body is nested too deeply; the limit is {MAX_DEPTH} levels", code="nested_too_deeply")


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise invalid(f"key {shown(twice)} appears twice in one object", param=twice[:80], code="duplicate_key")
    return result


def _refuse_constant(name: str) -> Any:
    raise invalid(f"the body contains {name}, which is not JSON", code="malformed_json")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise invalid(f"number {shown(text)} does not fit a 64-bit float", code="number_out_of_range")
    return value


def _refuse_lone_surrogates(data: Json) -> None:
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise invalid(
            "the body has a \\u escape of half a surrogate pair, which is not text", code="invalid_encoding"
        ) from None
