"""How a fault in a request is put into words: field, value, limit."""

from __future__ import annotations

import reprlib
from typing import Any

from pydantic import ValidationError

from lorahost.errors import InvalidRequestError

_SHOWN_CHARS = 80
# Bounds the work, too: a body may be 25 MiB.
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = _SHOWN_CHARS


def shown(value: Any) -> str:
    """`value` as an error message shows it: one line, at most 80 characters."""
    text = _REPR.repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"


def invalid(
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    status: int | None = None,
    **details: Any,
) -> InvalidRequestError:
    """An `InvalidRequestError` (400 unless `status` says otherwise)."""
    return InvalidRequestError(message, param=param, code=code, status=status, details=details)


def from_validation(error: ValidationError, prefix: str) -> InvalidRequestError:
    """The first fault that pydantic found, as a 400 that names the field, the value and the limit."""
    faults = error.errors(include_url=False)
    name = faults[0]["loc"][0]
    # A union reports a fault for each of its branches; the branch that got furthest is the one meant.
    fault = max((one for one in faults if one["loc"][0] == name), key=lambda one: len(one["loc"]))
    field = ".".join(str(part) for part in (prefix, name, *(p for p in fault["loc"][1:] if isinstance(p, int))))
    reason = fault["msg"].removeprefix("Value error, ")
    return invalid(
        f"{field} is {shown(fault['input'])}: {reason[:1].lower()}{reason[1:]}",
        param=field,
        code="invalid_parameter",
    )
