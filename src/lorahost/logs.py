"""JSON lines on standard output: one per request, and the host's own messages."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from typing import Any

REQUEST_LOGGER = "lorahost.request"
_PLAIN = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "taskName"}


class JsonFormatter(logging.Formatter):
    """One object a record; what is passed as `extra` becomes keys of its own."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({k: v for k, v in record.__dict__.items() if k not in _PLAIN})
        if record.exc_info:
            line["error"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(level: str) -> None:
    """Sends all of the process's logs to standard output as JSON lines."""
    root = logging.getLogger()
    root.handlers = [_handler()]
    root.setLevel(logging.WARNING)
    for name in ("lorahost", "lorahost_kernels"):
        own = logging.getLogger(name)
        # not the root's: a package that vLLM imports sets the root's handlers to errors only
        own.handlers, own.propagate = [_handler()], False
        own.setLevel(level.upper())
    logging.getLogger(REQUEST_LOGGER).setLevel(logging.INFO)


def _handler() -> logging.Handler:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter())
    return handler


def request_line(fields: dict[str, Any]) -> None:
    """Logs one finished request; keys are the metrics' names, values JSON types."""
    logging.getLogger(REQUEST_LOGGER).info("request", extra={k: v for k, v in fields.items() if v is not None})
