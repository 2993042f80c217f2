"""`additionalModelResponseFieldPaths`: JSON pointers (RFC 6901) into the engine's OpenAI answer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from lorahost.core import Json
from lorahost.requests.problems import invalid, shown

_POINTER = re.compile(r"(?:/(?:[^~/]|~[01])*)+")


def check(path: str, field: str) -> None:
    """Refuses what is not a JSON pointer.

    Raises:
        InvalidRequestError: names `field`.
    """
    if not _POINTER.fullmatch(path):
        raise invalid(
            f"{field} is {shown(path)}; it must be a JSON pointer such as /choices/0/logprobs",
            param=field,
            code="invalid_field",
        )


def pick(answer: Json, paths: Iterable[str]) -> Json:
    """What the pointers find, in nested objects with the pointers' own keys (`/choices/0/x` -> choices, "0", x).

    A path that finds nothing is left out.
    """
    picked: Json = {}
    for path in paths:
        keys = [key.replace("~1", "/").replace("~0", "~") for key in path.split("/")[1:]]
        found, value = _find(answer, keys)
        if found:
            _put(picked, keys, value)
    return picked


def _find(value: Any, keys: list[str]) -> tuple[bool, Any]:
    for key in keys:
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isascii() and key.isdigit() and len(key) < 10 and int(key) < len(value):
            value = value[int(key)]
        else:
            return False, None
    return True, value


def _put(picked: Json, keys: list[str], value: Any) -> None:
    """A path above or below one that was picked already adds nothing to the wider of the two."""
    for key in keys[:-1]:
        below = picked.setdefault(key, {})
        if not isinstance(below, dict):
            return
        picked = below
    picked[keys[-1]] = value
