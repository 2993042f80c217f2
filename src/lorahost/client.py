"""What `lorahost adapters` does: the adapter routes of a server, and the importer without one."""

from __future__ import annotations

import json
import tempfile
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib import error, request
from urllib.parse import quote

from lorahost.adapters import chat_template
from lorahost.adapters.importer import ImportLimits, digest_of, import_adapter
from lorahost.adapters.layout import ModelLayout
from lorahost.errors import InvalidRequestError

TIMEOUT_S = 1800.0
Answer = tuple[int, dict[str, Any]]


def _call(method: str, url: str, body: dict[str, Any] | None = None) -> Answer:
    data = None if body is None else json.dumps(body).encode()
    call = request.Request(url, data=data, method=method, headers={"Content-Type": "application/json"})
    try:
        with request.urlopen(call, timeout=TIMEOUT_S) as answer:
            return answer.status, _object(answer.read(), url)
    except error.HTTPError as refused:
        return refused.code, _object(refused.read(), url)
    except (OSError, HTTPException) as failed:
        reason = getattr(failed, "reason", failed)
        return 503, {"error": {"message": f"no answer from {url}: {reason}", "type": "unreachable"}}


def _object(text: bytes, url: str) -> dict[str, Any]:
    """The JSON object that a lorahost server answers with; an error of that shape for anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    shown = text[:80].decode(errors="replace")
    return {"error": {"message": f"{url} is no lorahost server: it answered {shown!r}", "type": "unexpected_answer"}}


def add(url: str, name: str, src: str, *, preload: bool, pin: bool) -> Answer:
    """Registers an adapter; a local path is made absolute."""
    if "://" not in src:
        src = str(Path(src).resolve())
    return _call("POST", f"{url}/adapters", {"name": name, "src": src, "preload": preload, "pin": pin})


def rm(url: str, name: str) -> Answer:
    """Unregisters an adapter."""
    return _call("DELETE", f"{url}/adapters/{quote(name, safe='')}")


def ls(url: str) -> Answer:
    """All adapters of the server, as one page."""
    found: list[dict[str, Any]] = []
    token = ""
    while True:
        status, page = _call("GET", f"{url}/adapters?limit=100" + (f"&next_page_token={quote(token)}" if token else ""))
        if status >= 400 or "adapters" not in page:
            return max(status, 400), page
        found += page["adapters"]
        token = page.get("nextPageToken", "")
        if not token:
            return status, {"adapters": found}


def table(rows: list[dict[str, Any]]) -> str:
    """Adapters as aligned columns."""
    columns = ("name", "state", "loaded", "pin", "rank", "in_flight", "digest", "src")
    lines = [columns, *(tuple(_cell(row.get(c)) for c in columns) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, str) and len(value) == 64:
        return value[:12]
    return "-" if value is None else str(value)


def check(path: str, model: str, max_rank: int) -> dict[str, Any]:
    """Imports an adapter into a temporary directory and says what was found.

    Raises:
        AdapterRejectedError: it can't be served.
        InvalidRequestError: `model` has no readable config.json.
    """
    config = Path(model)
    config = config / "config.json" if config.is_dir() else config
    try:
        parsed = json.loads(config.read_text())
    except (OSError, ValueError) as error_:
        raise InvalidRequestError(f"--model {model}: no readable config.json: {error_}", param="model") from error_
    if not isinstance(parsed, dict):
        raise InvalidRequestError(f"--model {model}: config.json is not an object", param="model")
    layout = ModelLayout.from_config(parsed, internal_router_lora=True)
    source = Path(path)
    with tempfile.TemporaryDirectory() as scratch:
        limits = ImportLimits(max_rank=max_rank, max_bytes=1 << 40, dtype="bfloat16")
        report = import_adapter(source, Path(scratch) / "adapter", layout, limits)
    return {
        "servable": True,
        "digest": chat_template.digest_with(digest_of(source), source),
        **report.model_dump(mode="json"),
    }
