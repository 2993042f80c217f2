"""Replacing attributes of vLLM classes and modules, with a record of what was replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class PluginError(RuntimeError):
    """The plugin can't work with this vLLM; the message says what differs."""


_originals: dict[str, Any] = {}


def qualified_name(owner: Any, name: str) -> str:
    """`module:Class.name`, or `module:name` where `owner` is a module."""
    if isinstance(owner, type):
        return f"{owner.__module__}:{owner.__qualname__}.{name}"
    return f"{owner.__name__}:{name}"


def patch(owner: Any, name: str, replacement: Any) -> None:
    """Sets `owner.name` to `replacement` and keeps the first original for `original`."""
    _originals.setdefault(qualified_name(owner, name), getattr(owner, name))
    setattr(owner, name, replacement)


def original(owner: Any, name: str) -> Callable[..., Any]:
    """What `owner.name` was before the first `patch`; KeyError when it was never patched."""
    function: Callable[..., Any] = _originals[qualified_name(owner, name)]
    return function


def applied() -> list[str]:
    """Qualified names of all that is patched in this process, sorted."""
    return sorted(_originals)
