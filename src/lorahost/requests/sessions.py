"""Sticky sessions: SageMaker routes all requests of one session to one copy, where its prefix is cached.

A session holds no state of its own here; the store only says which ids are valid.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from lorahost.errors import OverloadedError
from lorahost.requests.headers import CLOSED_SESSION_ID, NEW_SESSION_ID, SESSION_ID
from lorahost.requests.problems import invalid, shown

SessionAction = Literal["NEW_SESSION", "CLOSE"]
NEW_SESSION: SessionAction = "NEW_SESSION"
CLOSE: SessionAction = "CLOSE"


@dataclass(frozen=True, slots=True)
class Session:
    """An open session; `expires_at` is Unix time in seconds, and use does not extend it."""

    id: str
    expires_at: float

    def headers(self) -> dict[str, str]:
        """Response headers of its creation: both names, as containers differ in which one they set."""
        when = datetime.fromtimestamp(self.expires_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        value = f"{self.id}; Expires={when}"
        return {NEW_SESSION_ID: value, SESSION_ID: value}


@dataclass(frozen=True, slots=True)
class SessionAnswer:
    """The 200 answer to a session request: response headers and JSON body."""

    headers: dict[str, str]
    body: dict[str, str]


class SessionStore:
    """The open sessions of this process; thread-safe.

    Args:
        enabled: `SAGEMAKER_ENABLE_STATEFUL_SESSIONS`; when False every session header or request is a 400.
        expiration_s: `SAGEMAKER_SESSIONS_EXPIRATION`, seconds from creation.
        max_sessions: Most sessions open at once; one more is a 424 until one closes or expires.
        clock: Unix time in seconds.
    """

    def __init__(
        self,
        enabled: bool,
        expiration_s: float = 1200.0,
        max_sessions: int = 10_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if expiration_s <= 0 or max_sessions < 1:
            raise ValueError(f"expiration_s={expiration_s} and max_sessions={max_sessions} must be positive")
        self._enabled = enabled
        self._expiration_s = expiration_s
        self._max_sessions = max_sessions
        self._clock = clock
        self._lock = threading.Lock()
        # In order of creation, which is the order of expiry as long as the clock does not step back.
        self._sessions: dict[str, Session] = {}

    def handle(self, action: SessionAction, session_id: str | None) -> SessionAnswer:
        """Answers a session request; `session_id` is the header, which a NEW_SESSION ignores.

        Raises:
            InvalidRequestError: sessions are off, or the id to close is missing, unknown or expired.
            OverloadedError: 424, `max_sessions` are open.
        """
        if action == NEW_SESSION:
            session = self.create()
            return SessionAnswer(session.headers(), {"status": f"Session {session.id} created"})
        if session_id is None:
            raise invalid(
                f"requestType is CLOSE, but header {SESSION_ID} is missing",
                param=SESSION_ID,
                code="missing_session",
            )
        self.close(session_id)
        return SessionAnswer({CLOSED_SESSION_ID: session_id}, {"status": f"Session {session_id} closed"})

    def create(self) -> Session:
        """Opens a session.

        Raises:
            InvalidRequestError: sessions are off.
            OverloadedError: 424, `max_sessions` are open; `retry_after_s` is when the oldest expires.
        """
        self._require_enabled()
        with self._lock:
            self._purge()
            if len(self._sessions) >= self._max_sessions:
                oldest = next(iter(self._sessions.values()))
                raise OverloadedError(
                    f"{len(self._sessions)} sessions are open; the limit is {self._max_sessions}",
                    code="too_many_sessions",
                    status=424,
                    retry_after_s=max(0.0, oldest.expires_at - self._clock()),
                    details={"open": len(self._sessions), "limit": self._max_sessions},
                )
            session = Session(str(uuid.uuid4()), self._clock() + self._expiration_s)
            self._sessions[session.id] = session
            return session

    def check(self, session_id: str | None) -> Session | None:
        """The session that a request belongs to; None without a header.

        Raises:
            InvalidRequestError: sessions are off, or the id is unknown or expired.
        """
        if session_id is None:
            return None
        self._require_enabled()
        with self._lock:
            return self._open(session_id)

    def close(self, session_id: str) -> None:
        """Closes a session.

        Raises:
            InvalidRequestError: sessions are off, or the id is unknown or expired.
        """
        self._require_enabled()
        with self._lock:
            self._open(session_id)
            del self._sessions[session_id]

    def _open(self, session_id: str) -> Session:
        session = self._sessions.get(session_id)
        if session is None or self._clock() > session.expires_at:
            self._sessions.pop(session_id, None)
            raise invalid(
                f"session {shown(session_id)} is unknown, closed or expired; sessions live {self._expiration_s:g} s",
                param=SESSION_ID,
                code="unknown_session",
            )
        return session

    def _purge(self) -> None:
        now = self._clock()
        expired = [session.id for session in self._sessions.values() if now > session.expires_at]
        for session_id in expired:
            del self._sessions[session_id]

    def _require_enabled(self) -> None:
        if not self._enabled:
            raise invalid(
                f"stateful sessions are off; set SAGEMAKER_ENABLE_STATEFUL_SESSIONS=true to use {SESSION_ID}",
                param=SESSION_ID,
                code="sessions_disabled",
            )
