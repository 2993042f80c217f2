"""A client's socket, as the engine's loop sees it: is the client still there, and take these bytes.

A streamed answer is written by the loop's own thread, without a queue and a thread switch per token: the HTTP
thread sends the head and the first event, hands the socket over, and sleeps until the stream is done.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections import deque
from collections.abc import Callable

POLL_S = 0.25
HIGH_WATER_BYTES = 1 << 20
LOW_WATER_BYTES = 1 << 16


class ClientGoneError(ConnectionError):
    """The client closed its connection, or stopped reading for longer than the limit."""


class ClientSocket:
    """Watches one client and writes one streamed answer to it. All methods run on the loop, `attach` included.

    Args:
        sock: The connection, or None where the HTTP server shows none (a test client, say): never gone.
        chunked: Whether the body uses HTTP/1.1 chunked framing.
        stall_s: Seconds that a full socket may stay full before the client counts as gone.
    """

    def __init__(self, sock: socket.socket | None, *, chunked: bool, stall_s: float = 60.0) -> None:
        self._sock = sock
        self._chunked = chunked
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._attached = False
        self._writing = False
        self._reading = False
        self._poll_timer: asyncio.TimerHandle | None = None
        self._drained = asyncio.Event()
        self._gone: BaseException | None = None
        self._on_gone: Callable[[], object] | None = None

    def watch(self, on_gone: Callable[[], object]) -> None:
        """Calls `on_gone` once, as soon as the client has closed its side."""
        if self._sock is None:
            return
        self._on_gone = on_gone
        self._loop.add_reader(self._sock.fileno(), self._readable)
        self._reading = True
        self._poll_timer = self._loop.call_later(POLL_S, self._poll)

    def _readable(self) -> None:
        """End-of-file means gone; after a pipelined request only `_poll` can see one."""
        assert self._sock is not None
        try:
            if self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                self._stop_reading()
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._set_gone(ClientGoneError("the client closed the connection"))

    def _poll(self) -> None:
        """Looks at the connection's state now and then, whatever the reader has seen or missed."""
        assert self._sock is not None
        poller = select.poll()
        poller.register(self._sock.fileno(), select.POLLRDHUP)
        if poller.poll(0):
            self._set_gone(ClientGoneError("the client closed the connection"))
        else:
            self._poll_timer = self._loop.call_later(POLL_S, self._poll)

    def _set_gone(self, reason: BaseException) -> None:
        self._stop_reading()
        if self._gone is None:
            self._gone = reason
            self._drained.set()
            if self._on_gone is not None:
                self._on_gone()

    def _stop_reading(self) -> None:
        if self._reading:
            assert self._sock is not None
            self._loop.remove_reader(self._sock.fileno())
            self._reading = False

    def attach(self) -> None:
        """The HTTP thread has sent the head: what was held back may go out now."""
        self._attached = True
        self._flush()

    def send(self, event: bytes) -> None:
        """Writes one event as one HTTP chunk; never blocks, never joins two events.

        Raises:
            ClientGoneError: the client is gone.
        """
        if self._gone is not None:
            raise self._gone
        frame = b"%x\r\n%b\r\n" % (len(event), event) if self._chunked else event
        self._pending.append(frame)
        self._pending_bytes += len(frame)
        if self._attached and not self._writing:
            self._flush()

    async def room(self) -> None:
        """Waits while the client is far behind.

        Raises:
            ClientGoneError: it stayed behind for `stall_s`, or left.
        """
        if self._pending_bytes > HIGH_WATER_BYTES:
            await self._wait_drained()
        if self._gone is not None:
            raise self._gone

    async def flushed(self) -> None:
        """Waits until all is written, or the client is gone."""
        while self._pending and self._gone is None:
            await self._wait_drained()

    async def _wait_drained(self) -> None:
        self._drained.clear()
        try:
            await asyncio.wait_for(self._drained.wait(), self._stall_s)
        except TimeoutError:
            self._set_gone(ClientGoneError(f"the client read nothing for {self._stall_s:g} s"))

    def _flush(self) -> None:
        assert self._sock is not None
        try:
            while self._pending:
                frame = self._pending[0]
                sent = self._sock.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                self._pending_bytes -= sent
                if sent < len(frame):
                    self._pending[0] = frame[sent:]
                else:
                    self._pending.popleft()
        except BlockingIOError:
            self._start_writing()
            return
        except OSError as error:
            self._stop_writing()
            self._set_gone(ClientGoneError(str(error)))
            return
        self._stop_writing()
        self._drained.set()

    def _start_writing(self) -> None:
        if not self._writing:
            assert self._sock is not None
            self._loop.add_writer(self._sock.fileno(), self._writable)
            self._writing = True

    def _writable(self) -> None:
        self._flush()
        if self._pending_bytes <= LOW_WATER_BYTES:
            self._drained.set()

    def _stop_writing(self) -> None:
        if self._writing:
            assert self._sock is not None
            self._loop.remove_writer(self._sock.fileno())
            self._writing = False

    def release(self) -> None:
        """Takes the loop's hands off the socket; must run before the HTTP server gets it back."""
        self._stop_reading()
        self._stop_writing()
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        self._on_gone = None

    @property
    def gone(self) -> bool:
        """Whether the client is known to have left."""
        return self._gone is not None
