"""Do adapter loads stall other requests' tokens? Streams run while an adapter is loaded and removed again and again.

`python -m bench.adapter_loads --url http://localhost:8080 --src ADAPTER_DIR [--loads 20] [--streams 4]` against a
running server (`make demo`), prints the time between two tokens with and without loads: median, p99 and the longest.
Rows go to bench/results/loads.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import statistics
import threading
import time
from datetime import UTC, datetime
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import lorahost

RESULTS = Path(__file__).parent / "results" / "loads.csv"
QUIET_S = 10.0


class Streams:
    """Keeps streams running and notes when each of their tokens came."""

    def __init__(self, address: str, count: int) -> None:
        self._address = address
        self._stop = threading.Event()
        self.gaps: list[tuple[float, float]] = []
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            connection = HTTPConnection(self._address, timeout=120)
            body = json.dumps({"prompt": "The sea", "max_tokens": 256, "ignore_eos": True, "stream": True})
            connection.request("POST", "/invocations", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(answer.read().decode())
            last = None
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                now = time.monotonic()
                if last is not None:
                    self.gaps.append((now, now - last))
                last = now

    def between(self, start: float, end: float) -> list[float]:
        """Gaps in seconds whose end lies in the interval."""
        return [gap for at, gap in self.gaps if start <= at <= end]


def change(address: str, method: str, path: str, body: dict[str, str] | None = None) -> None:
    """One adapter change; an error ends the benchmark."""
    connection = HTTPConnection(address, timeout=600)
    connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(answer.read().decode())
    answer.read()


def summary(gaps: list[float]) -> dict[str, float]:
    """In ms."""
    cuts = statistics.quantiles(gaps, n=100)
    return {"p50": cuts[49] * 1e3, "p99": cuts[98] * 1e3, "longest": max(gaps) * 1e3}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://localhost:8080")
    parser.add_argument("--src", required=True, type=Path, help="an adapter of the server's base model")
    parser.add_argument("--loads", type=int, default=20)
    parser.add_argument("--streams", type=int, default=4)
    options = parser.parse_args()
    address = urlsplit(options.url).netloc
    with Streams(address, options.streams) as streams:
        time.sleep(2)
        quiet_start = time.monotonic()
        time.sleep(QUIET_S)
        loads_start = time.monotonic()
        for _ in range(options.loads):
            change(address, "POST", "/adapters", {"name": "bench-loads", "src": str(options.src.resolve())})
            change(address, "DELETE", "/adapters/bench-loads")
        loads_end = time.monotonic()
        quiet = summary(streams.between(quiet_start, loads_start))
        busy = summary(streams.between(loads_start, loads_end))
    print(f"ms between tokens, {options.streams} streams; {options.loads} loads in {loads_end - loads_start:.1f} s")
    print(f"{'':>12} {'p50':>8} {'p99':>8} {'longest':>8}")
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(
                ["benchmark", "mode", "metric", "unit", "value", "streams", "loads", "machine", "version", "date"]
            )
        for mode, result in (("quiet", quiet), ("loads", busy)):
            print(f"{mode:>12} {result['p50']:>8.2f} {result['p99']:>8.2f} {result['longest']:>8.2f}")
            for metric, value in result.items():
                shape = [options.streams, options.loads, platform.machine(), lorahost.__version__, date]
                writer.writerow(["loads", mode, metric, "ms", round(value, 3), *shape])


if __name__ == "__main__":
    main()
