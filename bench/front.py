"""Front-door benchmark: how late do events reach clients, and does any get lost or joined?

`python -m bench.front [--repeats 3]` runs our server and FastAPI + uvicorn in turn, each around the same engine
stand-in, and prints for each load:

- late: client's receive time minus the time at which the chunk was complete: what the front adds;
- step: receive time minus the end of the step: the front and the building of all streams' chunks.

Rows go to bench/results/front.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import re
import selectors
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

LOADS = ((16, 4.0), (64, 8.0), (128, 10.0))
TOKENS = 400
WARM_TOKENS = 50
RESULTS = Path(__file__).parent / "results" / "front.csv"
CONTENT = re.compile(rb'"content":"(\d+) (\d+) (\d+)"')


@dataclass
class Client:
    """One stream as its client sees it."""

    sock: socket.socket
    buffer: bytes = b""
    head_done: bool = False
    next_sequence: int = 0
    joined: int = 0
    lost: int = 0
    done: bool = False
    late_ns: list[int] = field(default_factory=list)
    step_ns: list[int] = field(default_factory=list)

    def feed(self, data: bytes, now: int) -> None:
        """Takes what one read returned: HTTP chunks, each of which must be one event."""
        self.buffer += data
        if not self.head_done:
            head, split, rest = self.buffer.partition(b"\r\n\r\n")
            if not split:
                return
            if b"200" not in head.split(b"\r\n", 1)[0]:
                raise RuntimeError(head.decode())
            self.buffer, self.head_done = rest, True
        while True:
            size_text, split, rest = self.buffer.partition(b"\r\n")
            if not split:
                return
            size = int(size_text, 16)
            if len(rest) < size + 2:
                return
            self.buffer = rest[size + 2 :]
            if size == 0:
                self.done = True
                return
            self._chunk(rest[:size], now)

    def _chunk(self, chunk: bytes, now: int) -> None:
        self.joined += chunk.count(b"data: ") - 1
        for found in CONTENT.finditer(chunk):
            sequence, step, built = map(int, found.groups())
            self.lost += sequence - self.next_sequence
            self.next_sequence = sequence + 1
            if sequence >= WARM_TOKENS:
                self.late_ns.append(now - built)
                self.step_ns.append(now - step)


def load(port: int, streams: int, tokens: int) -> list[Client]:
    """Runs `streams` streams at once and reads them from one thread."""
    selector = selectors.DefaultSelector()
    clients = []
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": tokens}).encode()
    request = b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    for _ in range(streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(request % (len(body), body))
        sock.setblocking(False)
        client = Client(sock)
        selector.register(sock, selectors.EVENT_READ, client)
        clients.append(client)
    deadline = time.monotonic() + 120
    while selector.get_map() and time.monotonic() < deadline:
        for key, _ in selector.select(1.0):
            client = key.data
            data = client.sock.recv(1 << 16)
            client.feed(data, time.monotonic_ns())
            if client.done or not data:
                selector.unregister(client.sock)
                client.sock.close()
    return clients


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    """Waits for GET /ping to say 200."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode}")
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=2) as sock:
                sock.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                if b" 200 " in sock.recv(64):
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise RuntimeError("the server did not become ready in 120 s")


def quantiles(samples: list[int]) -> tuple[float, float]:
    """Median and 99th percentile in ms."""
    cuts = statistics.quantiles(samples, n=100)
    return cuts[49] / 1e6, cuts[98] / 1e6


def measure(kind: str, streams: int, step_ms: float) -> dict[str, float]:
    """One server, one load."""
    port = free_port()
    command = [sys.executable, "-m", "bench.front_servers", kind, str(port), str(step_ms)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            wait_ready(port, process)
            clients = load(port, streams, TOKENS)
        finally:
            process.terminate()
            process.wait(30)
    late = [ns for c in clients for ns in c.late_ns]
    step = [ns for c in clients for ns in c.step_ns]
    missing = sum(TOKENS - c.next_sequence for c in clients)
    late_p50, late_p99 = quantiles(late)
    step_p50, step_p99 = quantiles(step)
    return {
        "late_p50": late_p50,
        "late_p99": late_p99,
        "step_p50": step_p50,
        "step_p99": step_p99,
        "lost": sum(c.lost for c in clients) + missing,
        "joined": sum(c.joined for c in clients),
    }


def append(rows: list[dict[str, object]]) -> None:
    """Appends tidy rows."""
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Runs all loads, ours and FastAPI in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    versions = " ".join(f"{n} {metadata.version(n)}" for n in ("flask", "gunicorn", "fastapi", "uvicorn", "uvloop"))
    print(f"{platform.machine()}, {versions}; ms, median of {repeats} runs")
    print(f"{'load':>16} {'server':>8} {'late p50':>9} {'late p99':>9} {'step p50':>9} {'step p99':>9} lost joined")
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    rows: list[dict[str, object]] = []
    for streams, step_ms in LOADS:
        runs: dict[str, list[dict[str, float]]] = {"ours": [], "fastapi": []}
        for _ in range(repeats):
            for kind, results in runs.items():
                results.append(measure(kind, streams, step_ms))
        for kind, results in runs.items():
            middle = {m: statistics.median(r[m] for r in results) for m in results[0]}
            worst = {m: max(r[m] for r in results) for m in ("lost", "joined")}
            print(
                f"{streams:>4} x {step_ms:>4.0f} ms    {kind:>8} {middle['late_p50']:>9.3f} {middle['late_p99']:>9.3f} "
                f"{middle['step_p50']:>9.3f} {middle['step_p99']:>9.3f} {worst['lost']:>4.0f} {worst['joined']:>6.0f}"
            )
            for metric, value in (middle | worst).items():
                unit = "events" if metric in worst else "ms"
                rows.append(
                    {
                        "benchmark": "front",
                        "provider": kind,
                        "streams": streams,
                        "step_ms": step_ms,
                        "metric": metric,
                        "unit": unit,
                        "value": round(value, 4),
                        "repeats": repeats,
                        "machine": f"{platform.machine()} {len(__import__('os').sched_getaffinity(0))} cores",
                        "versions": versions,
                        "date": date,
                    }
                )
    append(rows)


if __name__ == "__main__":
    main()
