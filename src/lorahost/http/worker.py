"""How this server differs from gunicorn as it comes: JSON errors and logs, pipelining, limits of patience and files."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import resource
import socket
import struct
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from gunicorn.glogging import Logger
from gunicorn.http import errors
from gunicorn.workers.gthread import ThreadWorker

from lorahost.errors import EngineFailedError, HostError, InvalidRequestError
from lorahost.exit_codes import ExitCode
from lorahost.http.exchange import error_head

log = logging.getLogger(__name__)
PIECE_BYTES = 1 << 16
PIECES = 64
# for the engine, adapters and logs
OTHER_FILES = 512
LEAST_CONNECTIONS = 64
ENDED = re.compile(r"Worker \(pid:(\d+)\) (?:was sent|exited)")
REASONS = {
    "Worker failed to boot.": f"the engine has failed (exit code {ExitCode.ENGINE_DEAD})",
    "App failed to load.": f"the server could not start (exit code {ExitCode.START_FAILED})",
}


def connection_limit(wanted: int) -> int:
    """How many connections may be open: `wanted`, or what the limit of open files leaves, which is raised if it can be.

    One file too many would end the worker, not just the connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    allowed = max(LEAST_CONNECTIONS, soft - OTHER_FILES)
    log.warning("the limit of %d open files allows %d connections instead of %d", soft, allowed, wanted)
    return allowed


def limit_patience(listeners: Iterable[Any], seconds: float) -> None:
    """Bounds how long a thread waits for a client's next bytes, or for room to send: accepted sockets inherit it.

    Without it half a request, or an answer that nobody reads, holds an HTTP thread for ever.
    """
    whole = math.floor(seconds)
    limit = struct.pack("@ll", whole, math.floor((seconds - whole) * 1e6))
    for listener in listeners:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            listener.sock.setsockopt(socket.SOL_SOCKET, option, limit)


class HostWorker(ThreadWorker):
    """The worker class of the server."""

    def finish_request(self, conn: Any, fs: Future[Any]) -> None:
        """Takes up the next request at once if it has been read with the last one: no poller would see it."""
        if self.alive and not fs.cancelled() and fs.exception() is None and fs.result() is True and _pipelined(conn):
            self.enqueue_req(conn)
        else:
            super().finish_request(conn, fs)

    def handle_error(self, req: Any, client: socket.socket, addr: Any, exc: BaseException) -> None:
        """Answers what never reached the application, as JSON."""
        error = _described(exc)
        if error.status == 500:
            log.error("request failed before it reached the application", exc_info=exc)
        else:
            log.warning("malformed request: %s", error.message)
        head = error_head(error)
        phrase = HTTPStatus(head.status).phrase
        lines = [f"HTTP/1.1 {head.status} {phrase}", "Connection: close", f"Content-Length: {len(head.body)}"]
        lines += [f"{name}: {value}" for name, value in head.headers.items()]
        with contextlib.suppress(OSError):
            client.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + head.body)
            _discard_received(client)


class HostLogger(Logger):
    """gunicorn's messages go where all others go, as JSON lines, without what isn't so.

    The master adopts the engine's processes and ends them with SIGKILL after a drain; gunicorn takes each for a worker.
    It also has meanings of its own for two exit codes of ours.
    """

    # the master's own, by process id; set by it
    workers: Mapping[int, Any] = MappingProxyType({})

    def setup(self, cfg: Any) -> None:
        """No handlers of its own."""
        self.error_log.handlers.clear()
        self.error_log.propagate = True
        self.error_log.setLevel(str(cfg.loglevel).upper())

    def error(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Names what gunicorn misnames."""
        if self._of_no_worker(msg, args):
            return
        if msg == "Reason: %s" and args:
            args = (REASONS.get(str(args[0]), args[0]),)
        super().error(msg, *args, **kwargs)

    def warning(self, msg: object, *args: object, **kwargs: Any) -> None:
        """The same for other signals than SIGKILL."""
        if not self._of_no_worker(msg, args):
            super().warning(msg, *args, **kwargs)

    def _of_no_worker(self, msg: object, args: tuple[object, ...]) -> bool:
        found = ENDED.match(str(msg) % args if args else str(msg))
        if found is None or int(found[1]) in self.workers:
            return False
        log.info("an adopted process, pid %s, has ended", found[1])
        return True

    def exception(self, msg: object, *args: object, **kwargs: Any) -> None:
        """A client without patience is no fault of ours and needs no traceback."""
        if isinstance(sys.exc_info()[1], BlockingIOError):
            self.error_log.warning("a client stopped sending or reading; its connection is closed")
        else:
            super().exception(msg, *args, **kwargs)


def _pipelined(conn: Any) -> bool:
    return conn.parser is not None and conn.parser.unreader.buf.getbuffer().nbytes > 0


def _discard_received(client: socket.socket) -> None:
    """Empties the receive buffer: closing a socket with unread bytes resets it, and the answer is lost."""
    for _ in range(PIECES):
        if not client.recv(PIECE_BYTES, socket.MSG_DONTWAIT):
            return


def _described(exc: BaseException) -> HostError:
    """The error that says what was wrong with the request."""
    if isinstance(exc, errors.LimitRequestHeaders):
        return InvalidRequestError(f"the request's headers are too large: {exc}", code="headers_too_large", status=431)
    if isinstance(exc, errors.LimitRequestLine):
        return InvalidRequestError(f"the request line is too long: {exc}", code="uri_too_long", status=414)
    if isinstance(exc, errors.ExpectationFailed):
        return InvalidRequestError(str(exc), code="expectation_failed", status=417)
    if isinstance(exc, errors.UnsupportedTransferCoding):
        return InvalidRequestError(str(exc), code="unsupported_transfer_coding", status=501)
    if isinstance(exc, errors.ParseException) and not isinstance(exc, errors.ConfigurationProblem):
        return InvalidRequestError(f"the request is not valid HTTP: {exc}", code="malformed_http")
    return EngineFailedError(f"internal error: {type(exc).__name__}", code="internal_error")
