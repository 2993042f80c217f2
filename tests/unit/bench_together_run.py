"""Runs of engines that take turns, with stand-ins for their processes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lorahost.bench import rows
from lorahost.bench.loads import Load
from lorahost.bench.point import Point, to_arguments
from lorahost.bench.rows import Row
from lorahost.bench.together import Outcome, Together
from lorahost.bench.together_options import Options
from lorahost.bench.together_plan import Spec

ROOT = Path(__file__).parents[2]
CLOSED, SOLO = Load(concurrency=16), Load(concurrency=1)
POINT = Point("ours", loads=(CLOSED,), repeats=1, benchmark="together", commit="abc1234")
NAMES = "base,stock:marlin,ours"


class Bench:
    """A run in a folder; what it says is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "rows.csv"
        self.said: list[str] = []
        self.started: list[str] = []

    def made(
        self, point: Point = POINT, clock: Callable[[], float] = time.monotonic, extra: Any = None, **more: Any
    ) -> Together:
        given: dict[str, Any] = {
            "paths": NAMES, "base_loads": "", "kv_bytes": 2.5e9, "utilization": 0.2, "start_limit": 300.0,
            "limit": 600.0, "logs": "", "probe": False, "reference": "stock:marlin", "profile": False,
            "alternations": 2, "out": self.out, "work": self.folder / "work",
            "extra_of": [f"{name}={json.dumps(value)}" for name, value in (extra or {}).items()], "slots_of": [],
            "spec_of": [],
        }  # fmt: skip
        return Together(point, Options.of({**given, **more}), self.said.append, clock)

    def run(self, point: Point = POINT, **more: Any) -> Outcome:
        return self.made(point, **more).run(self.command)

    def command(self, spec: Spec, folder: Path) -> list[str]:
        self.started.append(spec.name)
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.unit.bench_stand_in import main; main()"
        return [sys.executable, "-c", code, *to_arguments(spec.point), "--turns", str(folder)]

    @property
    def rows(self) -> list[Row]:
        return rows.read(self.out)

    def text(self) -> str:
        return "\n".join(self.said)
