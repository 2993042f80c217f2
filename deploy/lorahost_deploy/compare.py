"""Is what AWS describes already what is wanted?"""

from __future__ import annotations

import hashlib
import json
from typing import Any


def holds(found: Any, wanted: Any) -> bool:
    """Whether `found` is `wanted` and perhaps more members, as AWS adds defaults."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(holds(found.get(name), value) for name, value in wanted.items())
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(holds, found, wanted))
    return bool(found == wanted)


def named(prefix: str, request: dict[str, Any]) -> str:
    """A name for something that can't be changed: another request gets another name."""
    text = json.dumps(request, sort_keys=True)
    return f"{prefix}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
