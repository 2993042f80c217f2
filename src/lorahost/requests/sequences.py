"""How much of the engine one request asks for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lorahost.core import Json
from lorahost.requests.problems import invalid


def check(bodies: Iterable[Json], limit: int) -> None:
    """Raises InvalidRequestError for more than `limit` sequences: admission counts a request as one.

    Args:
        bodies: OpenAI bodies that one request becomes.
        limit: Most sequences, prompts times `n`.
    """
    total = sum(_prompts(body.get("prompt")) * _times(body.get("n")) for body in bodies)
    if total > limit:
        raise invalid(
            f"the request asks for {total} sequences, prompts times n; the limit is {limit} (LORAHOST_MAX_SEQUENCES)",
            param="n",
            code="too_many_sequences",
        )


def _prompts(prompt: Any) -> int:
    # A list of token ids is one prompt.
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return len(prompt) if several else 1


def _times(n: Any) -> int:
    return n if isinstance(n, int) and n > 1 else 1
