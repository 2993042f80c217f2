"""One registered name: what was asked for, which version is live, which ones drain, and its records."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from lorahost.adapters.versions import AdapterRecord, State, Version
from lorahost.errors import AdapterRejectedError, HostError, InvalidRequestError

MAX_PAGE = 1000
MAX_NAME = 512


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a registration asks for."""

    src: str
    alias: str | None
    preload: bool
    pin: bool


@dataclass(eq=False)
class Entry:
    """The mutable side of an adapter; only the loop touches it.

    Attributes:
        asked: Options of the live version; before the first one is live, of the registration.
        live: Answers new requests.
        draining: Retired versions that are not gone yet.
        failure: Why the adapter can't answer; None while `live` can, or a change is under way.
        pin_wanted: A change that will pin is under way: counts as a pin.
        removed: Set by a removal: no new requests, and changes under way give up.
        withdrawn: The removal has retired the live version; the entry goes with its last version.
        removal: The latest removal.
        former: The removed entry of the same name that this one replaced, while its versions drain.
        settled: There is an answer for who waits: a live version, a failure or a removal.
    """

    name: str
    asked: Wanted
    live: Version | None = None
    draining: set[Version] = field(default_factory=set)
    failure: HostError | None = None
    last_error: str | None = None
    incoming: Literal["fetching", "loading"] | None = None
    pin_wanted: bool = False
    withdrawn: bool = False
    removal: asyncio.Task[AdapterRecord] | None = None
    former: Entry | None = None
    removed: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    def restart(self, wanted: Wanted) -> None:
        """A registration is on its way and nothing is live: who asks for the adapter waits for it."""
        if self.live is None and not self.removed.is_set():
            self.asked, self.failure = wanted, None
            self.settled.clear()

    def leaving(self) -> set[Version]:
        """Versions that drain under this name, those of a former entry too."""
        former = self.former
        if former is None:
            return self.draining
        return self.draining | former.leaving() | ({former.live} if former.live else set())

    @property
    def pinned(self) -> bool:
        """Takes one of the pins: a failed adapter doesn't."""
        return not self.removed.is_set() and (self.pin_wanted or (self.asked.pin and self.live is not None))

    @property
    def state(self) -> State:
        if self.removed.is_set():
            return "draining"
        if self.failure is not None:
            return "failed"
        if self.live is not None:
            return "ready"
        return self.incoming or "fetching"

    def record(self) -> AdapterRecord:
        """A snapshot of now."""
        live, asked = self.live, self.asked
        leaving = self.leaving()
        in_flight = sum(len(v.leases) for v in leaving) + (len(live.leases) if live else 0)
        return AdapterRecord(
            name=self.name,
            alias=asked.alias,
            src=asked.src,
            state=self.state,
            preload=asked.preload,
            pin=asked.pin,
            reason=self.failure.message if self.failure and not self.removed.is_set() else None,
            last_error=self.last_error,
            incoming=self.incoming,
            digest=live.digest if live else None,
            rank=live.rank if live else None,
            modules=len(live.modules) if live else 0,
            bytes=live.bytes if live else 0,
            loaded=live is not None and live.resident is not None,
            in_flight=in_flight,
            versions_draining=len(leaving),
            seconds=dict(live.seconds) if live else {},
            warnings=tuple(live.warnings) if live else (),
        )

    def refusal(self) -> AdapterRejectedError:
        """What a request meets while the adapter is failed."""
        failure = self.failure or HostError("it has no version")
        return AdapterRejectedError(
            f"adapter {self.asked.alias or self.name!r} can't be served: {failure.message}",
            code=failure.code,
            details=dict(failure.details),
        )


def check_wanted(name: str, wanted: Wanted, reserved: frozenset[str]) -> None:
    """Raises InvalidRequestError for a registration that can't be meant."""
    for param, text in (("name", name), ("src", wanted.src), ("alias", wanted.alias)):
        if text is None and param == "alias":
            continue
        if not isinstance(text, str) or not text.strip():
            raise InvalidRequestError(f"{param} must be a non-empty string, not {text!r}", param=param)
        if param != "src" and (len(text) > MAX_NAME or not text.isprintable()):
            raise InvalidRequestError(
                f"{param} must be at most {MAX_NAME} printable characters, not {text[:80]!r} ({len(text)})",
                param=param,
            )
        if param != "src" and text != text.strip():
            raise InvalidRequestError(f"{param} must not begin or end with a space, as {text!r} does", param=param)
        if param != "src" and text in reserved:
            raise InvalidRequestError(f"{param} {text!r} is the base model's name; choose another", param=param)
    if name.startswith("/") or name.endswith("/"):
        raise InvalidRequestError(
            f"name must not begin or end with '/', as {name!r} does: it is part of a path",
            param="name",
        )
    check_pin(wanted)


def check_pin(wanted: Wanted) -> None:
    """Raises InvalidRequestError for a pin without preload."""
    if wanted.pin and not wanted.preload:
        raise InvalidRequestError(
            "pin=true needs preload=true: an adapter that isn't loaded can't be pinned", param="pin"
        )


def page(
    records: Iterable[AdapterRecord], limit: int, next_page_token: str | None
) -> tuple[list[AdapterRecord], str | None]:
    """One page in the order of names, and the token of the next one.

    Raises:
        InvalidRequestError: limit out of range, or a token that isn't ours.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_PAGE:
        raise InvalidRequestError(f"limit must be 1 to {MAX_PAGE}, not {limit!r}", param="limit")
    after = _decode(next_page_token) if next_page_token else ""
    rest = sorted((r for r in records if r.name > after), key=lambda r: r.name)
    token = _encode(rest[limit - 1].name) if len(rest) > limit else None
    return rest[:limit], token


def _encode(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def _decode(token: str) -> str:
    try:
        return base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(
            f"next_page_token {token[:80]!r} was not given out by this list", param="next_page_token"
        ) from error
