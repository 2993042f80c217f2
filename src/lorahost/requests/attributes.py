"""`X-Amzn-SageMaker-Custom-Attributes`: the one free header that SageMaker hands through both ways.

`adapter=NAME` selects an adapter, `route=/v1/...` treats an invocation as a call of that route,
`deadline_s=N` bounds it; every other key, and every piece without `=`, is the caller's own and is kept.
Pieces are separated by `;`, or by `,` where another `key=` follows. Values are percent-decoded, so that
names may hold `;`, `,` or `=`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from lorahost.requests.problems import invalid, shown

MAX_CHARS = 1024
INVOCATION_ROUTES = ("/invocations", "/v1/chat/completions", "/v1/completions")

_SEPARATOR = re.compile(r";|,(?=\s*[\w.-]+\s*=)")
_PRINTABLE_ASCII = re.compile(r"[\x20-\x7e]*")
# Everything printable that neither separates pieces nor starts an escape.
_SAFE = "!#$&'()*+-./:<>?@[\\]^_`{|}~\""


@dataclass(frozen=True, slots=True)
class Attributes:
    """What the header says.

    Attributes:
        adapter: Adapter name; None when the key is absent or its value empty.
        route: One of `INVOCATION_ROUTES`, or None.
        deadline_s: As text; the caller checks it as it does the body's field.
        extra: All other keys as the caller wrote them; a piece without `=` has the value "".
    """

    adapter: str | None = None
    route: str | None = None
    deadline_s: str | None = None
    extra: Mapping[str, str] = field(default_factory=dict)


def parse(value: str | None) -> Attributes:
    """Reads the header; None and "" give empty attributes.

    Raises:
        InvalidRequestError: longer than 1024 characters, not printable ASCII, `adapter` or `route` given
            twice with different values, or a route that is not an invocation route of this server.
    """
    if not value:
        return Attributes()
    if len(value) > MAX_CHARS:
        raise invalid(
            f"CustomAttributes has {len(value)} characters; the limit is {MAX_CHARS}",
            param="CustomAttributes",
            code="custom_attributes_too_long",
        )
    if not _PRINTABLE_ASCII.fullmatch(value):
        raise invalid(
            f"CustomAttributes is {shown(value)}; only printable ASCII (0x20 to 0x7e) is allowed",
            param="CustomAttributes",
            code="custom_attributes_not_ascii",
        )
    known: dict[str, str] = {}
    extra: dict[str, str] = {}
    for piece in _SEPARATOR.split(value):
        key, equals, raw = (part.strip() for part in piece.partition("="))
        text = unquote(raw)
        # Case must not matter here: `Adapter=x` taken for an unknown key would be answered by the base model.
        if equals and key.lower() in ("adapter", "route", "deadline_s"):
            _set_once(known, key.lower(), text)
        elif key:
            extra[key] = text
    return Attributes(
        adapter=known.get("adapter") or None,
        route=_checked_route(known.get("route") or None),
        deadline_s=known.get("deadline_s") or None,
        extra=extra,
    )


def render(adapter: str | None, digest: str | None, extra: Mapping[str, str] | None = None) -> str:
    """The response header's value, `adapter=<name>;version=<digest12>`, plus `extra`.

    The base model (`adapter` None) is `adapter=;version=base`. Whatever could be taken for a separator, and
    all that is not printable ASCII, is percent-encoded; `parse` reads it back.

    Raises:
        ValueError: the result is longer than 1024 characters, or an adapter comes without its digest.
    """
    if (adapter is None) != (digest is None):
        raise ValueError(f"adapter {adapter!r} and digest {digest!r} must be given together")
    fields = {"adapter": adapter or "", "version": "base" if digest is None else digest[:12]}
    value = ";".join(f"{_escaped(key)}={_escaped(text)}" for key, text in (fields | dict(extra or {})).items())
    if len(value) > MAX_CHARS:
        raise ValueError(f"the response's CustomAttributes has {len(value)} characters; the limit is {MAX_CHARS}")
    return value


def _escaped(text: str) -> str:
    return quote(text, safe=_SAFE, errors="replace")


def _set_once(known: dict[str, str], key: str, value: str) -> None:
    if known.setdefault(key, value) != value:
        raise invalid(
            f"CustomAttributes gives {key} twice: {shown(known[key])} and {shown(value)}",
            param="CustomAttributes",
            code="conflicting_custom_attributes",
        )


def _checked_route(route: str | None) -> str | None:
    if route is not None and route not in INVOCATION_ROUTES:
        raise invalid(
            f"CustomAttributes route is {shown(route)}; accepted are {', '.join(INVOCATION_ROUTES)}",
            param="CustomAttributes",
            code="unknown_route",
            routes=list(INVOCATION_ROUTES),
        )
    return route
