"""What `lorahost adapters` does: the adapter routes of a server, and the importer without one."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any
from urllib import error, request
from urllib.parse import quote

from lorahost.adapters.importer import ImportLimits, digest_of, import_adapter
from lorahost.adapters.layout import ModelLayout

TIMEOUT_S = 1800.0
Answer = tuple[int, dict[str, Any]]


def _call(method: str, url: str, body: dict[str, Any] | None = None) -> Answer:
    data = None if body is None else json.dumps(body).encode()
    call = request.Request(url, data=data, method=method, headers={"Content-Type": "application/json"})
    try:
        with request.urlopen(call, timeout=TIMEOUT_S) as answer:
            return answer.status, json.load(answer)
    except error.HTTPError as refused:
        return refused.code, json.load(refused)
    except error.URLError as failed:
        return 503, {"error": {"message": f"no server at {url}: {failed.reason}", "type": "unreachable"}}


def add(url: str, name: str, src: str, *, preload: bool, pin: bool) -> Answer:
    """Registers an adapter; a local path is made absolute."""
    if "://" not in src:
        src = str(Path(src).resolve())
    return _call("POST", f"{url}/adapters", {"name": name, "src": src, "preload": preload, "pin": pin})


def rm(url: str, name: str) -> Answer:
    """Unregisters an adapter."""
    return _call("DELETE", f"{url}/adapters/{quote(name, safe='')}")


def ls(url: str) -> list[dict[str, Any]]:
    """All adapters of the server."""
    found: list[dict[str, Any]] = []
    token = ""
    while True:
        status, page = _call("GET", f"{url}/adapters?limit=100" + (f"&next_page_token={quote(token)}" if token else ""))
        if status != 200:
            return [{"name": "error", "state": page["error"]["message"]}]
        found += page["adapters"]
        token = page.get("nextPageToken", "")
        if not token:
            return found


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
    """
    config = Path(model)
    config = config / "config.json" if config.is_dir() else config
    layout = ModelLayout.from_config(json.loads(config.read_text()))
    source = Path(path)
    with tempfile.TemporaryDirectory() as scratch:
        limits = ImportLimits(max_rank=max_rank, max_bytes=1 << 40, dtype="bfloat16")
        report = import_adapter(source, Path(scratch) / "adapter", layout, limits)
    return {"servable": True, "digest": digest_of(source), **report.model_dump(mode="json")}
