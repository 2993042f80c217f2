"""What is known of one request, from its arrival to its log line."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from lorahost.core import Json
from lorahost.transcript import Transcript

CLIENT_GONE_STATUS = 499


@dataclass(slots=True)
class Account:
    """What is known of one request, for its log line and the metrics."""

    request_id: str
    adapter: str | None
    label: str
    route: str
    session_id: str | None = None
    version: str | None = None
    started: float = field(default_factory=time.monotonic)
    queue_s: float | None = None
    first_token: float | None = None
    last_event: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    code: int = 200
    error: str | None = None
    # only while prompts are logged
    transcript: Transcript | None = None

    def take_usage(self, usage: Json | None) -> None:
        """Adds an answer's token counts."""
        if usage:
            self.prompt_tokens += usage.get("prompt_tokens") or 0
            self.output_tokens += usage.get("completion_tokens") or 0

    def line(self) -> Json:
        """The request's log line."""
        now = time.monotonic()
        ttft = None if self.first_token is None else round((self.first_token - self.started) * 1e3, 1)
        queue = None if self.queue_s is None else round(self.queue_s * 1e3, 1)
        return {
            "request_id": self.request_id,
            "session_id": self.session_id,
            "route": self.route,
            "adapter": self.adapter or "",
            "version": self.version,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "queue_ms": queue,
            "ttft_ms": ttft,
            "total_ms": round((now - self.started) * 1e3, 1),
            "code": self.code,
            "aborted": True if self.code == CLIENT_GONE_STATUS else None,
            "error": self.error,
            **(self.transcript.fields() if self.transcript is not None else {}),
        }
