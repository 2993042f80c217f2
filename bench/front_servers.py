"""The two servers of the front-door benchmark: `python -m bench.front_servers ours|fastapi PORT STEP_MS`."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from bench.front_engine import StepEngine, StepHost


def ours(port: int, step_s: float) -> None:
    """lorahost's own gunicorn application around the stand-in."""
    os.environ.update(LORAHOST_ENGINE="fake", LORAHOST_PORT=str(port), LORAHOST_HOST="127.0.0.1")
    os.environ.update(LORAHOST_BASE_NAME="base", LORAHOST_BEDROCK="on")
    from lorahost import logs, server
    from lorahost.adapters.fetch import SourceFetcher
    from lorahost.adapters.importer import digest_of
    from lorahost.adapters.preparation import AdapterTools
    from lorahost.adapters.registry import AdapterRegistry, RegistrySettings
    from lorahost.adapters.residency import EngineLimits
    from lorahost.core import EngineHost, EngineInfo
    from lorahost.engine.fake import import_plain
    from lorahost.host import Host
    from lorahost.http import gunicorn_app
    from lorahost.settings import load_settings

    settings = load_settings()

    def registry(engine: EngineHost, info: EngineInfo) -> AdapterRegistry:
        tools = AdapterTools(SourceFetcher().fetch, digest_of, import_plain)
        limits = EngineLimits(info.max_loras, info.max_cpu_loras)
        work_dir = Path(tempfile.mkdtemp())
        return AdapterRegistry(engine, tools, RegistrySettings(work_dir=work_dir, max_adapters=8, limits=limits))

    logs.configure("error")
    server.build = lambda environ=None: Host(settings, lambda: StepHost(step_s), registry)  # type: ignore[assignment]
    gunicorn_app.HostApplication(settings).run()


def fastapi(port: int, step_s: float) -> None:
    """The usual arrangement: FastAPI's StreamingResponse under uvicorn with uvloop and httptools."""
    app = FastAPI()
    engine = StepEngine(step_s)
    tasks: list[asyncio.Task[None]] = []

    @app.get("/ping")
    async def ping() -> dict[str, str]:
        if not tasks:
            tasks.append(asyncio.ensure_future(engine.run()))
        return {}

    @app.post("/invocations")
    async def invocations(request: Request) -> Any:
        body = await request.json()
        events = engine.events("chatcmpl-1", body["max_tokens"])
        return StreamingResponse(events, media_type="text/event-stream")

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", loop="uvloop", http="httptools")


if __name__ == "__main__":
    kind, port_, step_ms = sys.argv[1:4]
    {"ours": ours, "fastapi": fastapi}[kind](int(port_), float(step_ms) / 1e3)
