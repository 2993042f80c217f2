"""Front-door benchmark: how late do events reach clients, and does any get lost or joined?

`python -m bench.front [--repeats 3]` runs our server, on `/invocations` and on Bedrock's two streaming routes, and
FastAPI + uvicorn in turn, each around the same engine stand-in, and prints for each load:

- late: client's receive time minus the time at which the chunk was complete: what the front adds;
- step: receive time minus the end of the step: the front and the building of all streams' chunks.

Rows go to bench/results/front.csv.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import selectors
import socket
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from bench.front_clients import CONVERSE_STREAM, INVOCATIONS, INVOKE_STREAM, Client, Route, seen

LOADS = ((16, 4.0), (64, 8.0), (128, 10.0))
TOKENS = 400
RESULTS = Path(__file__).parent / "results" / "front.csv"
# provider: the server behind it, and the route that is asked
PROVIDERS = {
    "ours": ("ours", INVOCATIONS),
    "ours-converse": ("ours", CONVERSE_STREAM),
    "ours-invoke": ("ours", INVOKE_STREAM),
    "fastapi": ("fastapi", INVOCATIONS),
}


def load(port: int, route: Route, streams: int, tokens: int) -> list[Client]:
    """Runs `streams` streams at once and reads them from one thread."""
    selector = selectors.DefaultSelector()
    clients = []
    for _ in range(streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(route.request(tokens))
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


def measure(provider: str, streams: int, step_ms: float) -> dict[str, float]:
    """One server, one route, one load."""
    kind, route = PROVIDERS[provider]
    port = free_port()
    command = [sys.executable, "-m", "bench.front_servers", kind, str(port), str(step_ms)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            wait_ready(port, process)
            clients = load(port, route, streams, TOKENS)
        finally:
            process.terminate()
            process.wait(30)
    found = [seen(client, route.splitter()) for client in clients]
    late_p50, late_p99 = quantiles([ns for one in found for ns in one.late_ns])
    step_p50, step_p99 = quantiles([ns for one in found for ns in one.step_ns])
    return {
        "late_p50": late_p50,
        "late_p99": late_p99,
        "step_p50": step_p50,
        "step_p99": step_p99,
        "lost": sum(one.lost + TOKENS - one.tokens for one in found),
        "joined": sum(one.joined for one in found),
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
    """Runs all loads, all providers in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    versions = " ".join(f"{n} {metadata.version(n)}" for n in ("flask", "gunicorn", "fastapi", "uvicorn", "uvloop"))
    print(f"{platform.machine()}, {versions}; ms, median of {repeats} runs")
    print(f"{'load':>16} {'provider':>13} {'late p50':>9} {'late p99':>9} {'step p50':>9} {'step p99':>9} lost joined")
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    rows: list[dict[str, object]] = []
    for streams, step_ms in LOADS:
        runs: dict[str, list[dict[str, float]]] = {provider: [] for provider in PROVIDERS}
        for _ in range(repeats):
            for provider, results in runs.items():
                results.append(measure(provider, streams, step_ms))
        for provider, results in runs.items():
            middle = {m: statistics.median(r[m] for r in results) for m in results[0]}
            worst = {m: max(r[m] for r in results) for m in ("lost", "joined")}
            print(
                f"{streams:>4} x {step_ms:>4.0f} ms    {provider:>13} "
                f"{middle['late_p50']:>9.3f} {middle['late_p99']:>9.3f} "
                f"{middle['step_p50']:>9.3f} {middle['step_p99']:>9.3f} {worst['lost']:>4.0f} {worst['joined']:>6.0f}"
            )
            for metric, value in (middle | worst).items():
                unit = "events" if metric in worst else "ms"
                rows.append(
                    {
                        "benchmark": "front",
                        "provider": provider,
                        "streams": streams,
                        "step_ms": step_ms,
                        "metric": metric,
                        "unit": unit,
                        "value": round(value, 4),
                        "repeats": repeats,
                        "machine": f"{platform.machine()} {len(os.sched_getaffinity(0))} cores",
                        "versions": versions,
                        "date": date,
                    }
                )
    append(rows)


if __name__ == "__main__":
    main()
