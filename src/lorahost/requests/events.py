"""Reading vLLM's SSE events and writing JSON that stays one line."""

from __future__ import annotations

import json
from typing import Any

DONE = "[DONE]"
CUT_SHORT = "the engine's stream ended before it was complete"


def event_data(event: str) -> str:
    """The data of one SSE event that has one `data:` line."""
    return event.removeprefix("data:").strip()


def dumps(value: Any) -> str:
    """JSON with no character inside that a client could take for a line's end."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("\u0085", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
