"""Checks a request against the whole of botocore's service model.

botocore itself checks names, types and minima, not maxima, patterns and enumerations, which then fail at AWS.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from lorahost_deploy.errors import DeployError

PROPERTY = re.compile(r"\\p\{(\w+)\}")
POSIX = {"Print": r"\x20-\x7e", "ASCII": r"\x00-\x7f", "Alnum": "A-Za-z0-9", "Alpha": "A-Za-z", "Digit": "0-9"}
NUMBERS = frozenset({"integer", "long", "float", "double"})
SHOWN = 80


class StrictError(DeployError):
    """A request that the service's model does not allow.

    Attributes:
        problems: One sentence for each fault, with the member's path.
    """

    def __init__(self, operation: str, problems: list[str]) -> None:
        super().__init__(f"{operation}: " + "; ".join(problems))
        self.problems = problems


def check(model: Any, parameters: Mapping[str, Any]) -> None:
    """Checks the parameters of a botocore `OperationModel`.

    Raises:
        StrictError: something is unknown, missing, of the wrong type, out of range, or matches no pattern.
    """
    if found := list(problems(model.input_shape, parameters)):
        raise StrictError(model.name, found)


def problems(shape: Any, value: Any, where: str = "") -> Iterator[str]:
    """One sentence for each fault of `value`, read as the botocore `shape` (None: no members)."""
    if shape is None:
        yield from (f"unknown member {name}" for name in value)
    elif shape.type_name == "structure":
        yield from _structure(shape, value, where)
    elif shape.type_name == "list":
        yield from _list(shape, value, where)
    elif shape.type_name == "map":
        yield from _map(shape, value, where)
    else:
        yield from _scalar(shape, value, where)


def _structure(shape: Any, value: Any, where: str) -> Iterator[str]:
    if getattr(shape, "is_document_type", False):
        return
    if not isinstance(value, Mapping):
        yield _wrong_type(where, "an object", value)
        return
    for name in shape.required_members:
        if value.get(name) is None:
            yield f"{_at(where, name)} is missing"
    if getattr(shape, "is_tagged_union", False) and len(value) != 1:
        yield f"{where or shape.name} must have exactly one of {', '.join(shape.members)} (got {sorted(value)})"
    for name, member in value.items():
        if name not in shape.members:
            yield f"{_at(where, name)} is no member of {shape.name} (known: {', '.join(sorted(shape.members))})"
        elif member is not None:
            yield from problems(shape.members[name], member, _at(where, name))
        elif name not in shape.required_members:
            yield f"{_at(where, name)} is null; leave it out"


def _list(shape: Any, value: Any, where: str) -> Iterator[str]:
    if not isinstance(value, list | tuple):
        yield _wrong_type(where, "a list", value)
        return
    yield from _range(shape, len(value), where, "members")
    for i, item in enumerate(value):
        yield from problems(shape.member, item, f"{where}[{i}]")


def _map(shape: Any, value: Any, where: str) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield _wrong_type(where, "an object", value)
        return
    yield from _range(shape, len(value), where, "entries")
    for key, item in value.items():
        yield from problems(shape.key, key, f"{where} key {key!r}")
        yield from problems(shape.value, item, _at(where, str(key)))


def _scalar(shape: Any, value: Any, where: str) -> Iterator[str]:
    kind = shape.type_name
    if kind == "string":
        yield from _string(shape, value, where)
    elif kind == "boolean":
        if not isinstance(value, bool):
            yield _wrong_type(where, "true or false", value)
    elif kind in NUMBERS:
        whole = kind in ("integer", "long")
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            yield _wrong_type(where, "an integer" if whole else "a number", value)
        else:
            yield from _range(shape, value, where, "")
    elif kind == "blob" and not isinstance(value, bytes | bytearray | str) and not hasattr(value, "read"):
        yield _wrong_type(where, "bytes or a file", value)


def _string(shape: Any, value: Any, where: str) -> Iterator[str]:
    if not isinstance(value, str):
        yield _wrong_type(where, "a string", value)
        return
    yield from _range(shape, len(value), where, "characters")
    if shape.enum and value not in shape.enum:
        yield f"{where} is {value[:SHOWN]!r}; it must be one of {', '.join(shape.enum)}"
    pattern = shape.metadata.get("pattern")
    if pattern and not compiled(pattern).fullmatch(value):
        yield f"{where} is {value[:SHOWN]!r}; it must match {pattern}"


def _range(shape: Any, size: float, where: str, unit: str) -> Iterator[str]:
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    said = f"{size} {unit}".strip()
    if least is not None and size < least:
        yield f"{where} has {said}; the least is {least}" if unit else f"{where} is {said}; the least is {least}"
    if most is not None and size > most:
        yield f"{where} has {said}; the most is {most}" if unit else f"{where} is {said}; the most is {most}"


def _wrong_type(where: str, wanted: str, value: Any) -> str:
    return f"{where or 'the request'} must be {wanted} (got {type(value).__name__})"


def _at(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    r"""A service model's pattern, which is Java's dialect: `\p{L}`, `\z`, surrogate pairs, an open `-` in a class."""
    text = pattern.replace(r"\uD800\uDC00-\uDBFF\uDFFF", r"\U00010000-\U0010FFFF").replace(r"\z", r"\Z")
    text = text.replace(r"[\w-", r"[\w\-")
    out, end = "", 0
    for found in PROPERTY.finditer(text):
        out += text[end : found.start()]
        body = POSIX.get(found[1]) or _category(found[1])
        out += body if _inside_class(out) else f"[{body}]"
        end = found.end()
    return re.compile(out + text[end:])


def _inside_class(text: str) -> bool:
    plain = re.sub(r"\\.", "", text)
    return plain.rfind("[") > plain.rfind("]")


@cache
def _category(name: str) -> str:
    """All characters of a Unicode category, as the inside of a character class."""
    ranges: list[list[int]] = []
    for point in range(sys.maxunicode + 1):
        if unicodedata.category(chr(point)).startswith(name):
            if ranges and ranges[-1][1] == point - 1:
                ranges[-1][1] = point
            else:
                ranges.append([point, point])
    return "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges)
