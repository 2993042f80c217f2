"""Rows as steps write them, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lorahost.bench import rows
from lorahost.bench.point import Point

GPU = "NVIDIA H200"


def written(point: Point, values: Sequence[float], run: str, **more: Any) -> list[dict[str, object]]:
    """One row a repeat and load: OTPS as given, the other figures made from it."""
    where = {
        "gpu": GPU,
        "versions": "vllm 0.26.0",
        "commit": "abc1234",
        "date": "2026-01-02T03:04:05Z",
        "driver": "580",
    }
    return [
        {
            **point.row(), **where, "load": str(load), "repeat": i, "run": run, "otps_p50": value, "errors": 0,
            "requests": 4, "throughput": value * 16, "ttft_p50_ms": 1e5 / value, "ttft_p99_ms": 2e5 / value,
            "ttft_max_ms": 2e5 / value, "itl_p50_ms": 1e3 / value, "latency_p50_ms": 6e5 / value, **more,
        }
        for load in point.loads
        for i, value in enumerate(values, 1)
    ]  # fmt: skip


def write(path: Path, *steps: tuple[Point, Sequence[float], str]) -> Path:
    """A file of such rows."""
    for point, values, run in steps:
        rows.append(path, written(point, values, run))
    return path
