"""The server as it is, gunicorn included, around a fake engine that a test can slow down, hang or kill.

Run as `python -m tests.fakes.server '{"step_s": 0.01}'` with the server's own environment; `/test/engine` shows and
sets the engine's state. The option `removal_s` shortens the wait of a removal for running requests.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from flask import Flask, Response, jsonify, request

import lorahost.http.adapters as adapter_routes
import lorahost.http.app as http_app
import lorahost.server as server
from lorahost import logs
from lorahost.core import AdapterVersion, EngineCall, EngineInfo
from lorahost.engine.fake import FakeHost
from lorahost.errors import CapacityError
from lorahost.host import Host
from lorahost.http.gunicorn_app import HostApplication
from lorahost.settings import load_settings

SETTABLE = ("step_s", "load_s", "dead", "hung", "suffix", "full", "max_cpu_loras")


class ControlledHost(FakeHost):
    """A fake engine with knobs.

    Attributes:
        suffix: Put behind every token.
        full: Every load is refused for want of memory.
        fell_back: Operations whose self-check failed, as a worker reports it.
        loads: Engine names in the order of their loads.
    """

    def __init__(self, *, suffix: str = "", full: bool = False, fell_back: Sequence[str] = (), **options: Any) -> None:
        super().__init__(**options)
        self.suffix = suffix
        self.fell_back = fell_back
        self.full = full
        self.loads: list[str] = []

    async def start(self) -> EngineInfo:
        info = await super().start()
        [worker] = info.details["workers"]
        for name in self.fell_back:
            worker["kernels"][name] = {"path": "stock", "reason": "self-check failed", "fallback": True}
        return info

    async def _tokens_of(self, call: EngineCall, limit: int) -> AsyncGenerator[str, None]:
        async with aclosing(super()._tokens_of(call, limit)) as tokens:
            async for token in tokens:
                yield token + self.suffix

    async def load(self, version: AdapterVersion) -> frozenset[str]:
        if self.full:
            raise CapacityError("the engine has no memory left", details={"loaded": len(self.versions)})
        self.loads.append(version.engine_name)
        return await super().load(version)


def add_control(app: Flask, host: Host) -> Flask:
    """Adds `/test/engine`."""

    def control() -> Response:
        engine = host.engine
        assert isinstance(engine, ControlledHost)
        for name, value in (request.get_json(silent=True) or {}).items():
            assert name in SETTABLE, name
            setattr(engine, name, value)
        return jsonify(
            running=[v.engine_name if v else "base" for v in list(engine.running.values())],
            aborted=list(engine.aborted),
            held=[v.engine_name for v in list(engine.versions.values())],
            loads=list(engine.loads),
        )

    app.add_url_rule("/test/engine", "control", control, methods=["GET", "POST"])
    return app


def main() -> None:
    """Serves; the first argument is the engine's options as JSON."""
    options = json.loads(sys.argv[1])
    adapter_routes.DRAIN_TIMEOUT_S = options.pop("removal_s", adapter_routes.DRAIN_TIMEOUT_S)
    vars(server)["FakeHost"] = lambda **given: ControlledHost(**{**given, **options})
    create_app = http_app.create_app
    http_app.create_app = lambda host: add_control(create_app(host), host)
    settings = load_settings()
    logs.configure(settings.log_level)
    HostApplication(settings).run()


if __name__ == "__main__":
    main()
