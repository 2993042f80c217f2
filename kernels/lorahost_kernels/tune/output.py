"""What a run finds, in two files: the tuned configuration, and the state that the same command goes on from."""

from __future__ import annotations

import time
from pathlib import Path

from lorahost_kernels.tune import writer
from lorahost_kernels.tune.state import State
from lorahost_kernels.tune.writer import Result
from lorahost_kernels.tuned.schema import read
from lorahost_kernels.tuned.shape import ModelShape

SECONDS_BETWEEN = 5.0  # the file is checked as a whole each time that it is written


class Output:
    """The state is written after each point, the file every few seconds and at the end.

    Args:
        path: The tuned configuration file; points in it that are not measured again stay.
        state: Path of the state.
        shape: The model's shape.
        gpu: The GPU's name.
        run: With what is measured, see `gpu.provenance`.

    Raises:
        ConfigError: the file breaks the schema, or is of another GPU or shape.
        StateError: the state is of another run, or no state.
    """

    def __init__(self, path: Path, state: Path, shape: ModelShape, gpu: str, run: dict[str, str]) -> None:
        self.path, self.shape, self.gpu, self.run = path, shape, gpu, run
        versions = {k: v for k, v in run.items() if k not in ("date", "mix")}
        self.state = State(state, {"gpu": gpu, "model": shape.name, **versions})
        self.known: list[Result] = []
        self._written, self._new = -SECONDS_BETWEEN, bool(self.state.results)
        if path.exists():
            writer.write(path, shape, gpu, run, [])  # refuses another GPU's or shape's file before any work
            self.known = writer.results_of(read(path))

    def add(self, result: Result) -> None:
        """Keeps a point's result, in place of an earlier one."""
        self.state.add(result)
        self._new = True
        if time.monotonic() - self._written > SECONDS_BETWEEN:
            self.write()

    def write(self) -> None:
        """Brings the file up to date."""
        if self._new:
            writer.write(self.path, self.shape, self.gpu, self.run, self.state.results)
            self._written, self._new = time.monotonic(), False
