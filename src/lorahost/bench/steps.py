"""Resumable steps: a plan of engine starts, of which those are run whose rows are not in the file yet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lorahost.bench import rows
from lorahost.bench.point import Point, to_arguments
from lorahost.bench.rows import Row

Run = Callable[[list[str]], int]
# What tells a plan's steps apart; the GPU and the date are known only afterwards.
KEYS = (
    "benchmark", "path", "via", "alternation", "model", "layers", "input", "output", "adapters", "rank", "targets",
    "choice", "weights", "spec", "slots", "kernels", "moe_backend", "extra",
)  # fmt: skip


class StepFailedError(RuntimeError):
    """A step ended with an error or wrote no rows; what was measured before is in the file."""


def name(point: Point) -> str:
    """A step in a few words."""
    more = [point.via if point.via != "engine" else "", f"{point.slots} slots" if point.slots else ""]
    loads = " ".join(str(load) for load in point.loads)
    return " ".join(filter(None, [f"{point.alternation}", point.path, *more, loads]))


def done(point: Point, found: Sequence[Row]) -> bool:
    """Whether the file has all repeats of all loads of a step, from one engine start."""
    wanted = {key: rows.cell(value) for key, value in point.row().items()}
    mine = [row for row in found if all(row[key] == wanted[key] for key in KEYS)]
    for run in {row["run"] for row in mine}:
        counts = [sum(r["run"] == run and r["load"] == str(load) for r in mine) for load in point.loads]
        if all(count >= point.repeats for count in counts):
            return True
    return False


def read(path: Path) -> list[Row]:
    """Rows of a file; none of one that is not there yet."""
    return rows.read(path) if path.exists() else []


def command(point: Point, out: Path, work: Path | None) -> list[str]:
    """The command line of a step."""
    more = ["--work", str(work)] if work else []
    return [sys.executable, "-m", "lorahost.bench.engine_point", *to_arguments(point), "--out", str(out), *more]


def in_a_process(line: list[str]) -> int:
    """Runs a step's command; its output goes where ours goes."""
    return subprocess.run(line, check=False).returncode


def run(
    plan: Sequence[Point],
    out: Path,
    *,
    work: Path | None = None,
    most: int = 0,
    step: Run = in_a_process,
    say: Callable[[str], None] = print,
) -> list[Point]:
    """Runs what is missing, in the plan's order.

    Args:
        plan: All steps.
        out: File of rows.
        work: Folder of models and adapters that steps share.
        most: Steps to run at most; 0 for all.
        step: Runs a command line and returns its exit code.
        say: Gets progress.

    Returns:
        The steps that are still missing.

    Raises:
        StepFailedError: see there; the steps after it are not tried.
    """
    left = [point for point in plan if not done(point, read(out))]
    say(f"{len(plan) - len(left)} of {len(plan)} steps are in {out}")
    for point in left[: most or None]:
        say(f"step: {name(point)}")
        if code := step(command(point, out, work)):
            raise StepFailedError(f"step {name(point)} ended with {code}; run this again to go on from there")
        if not done(point, read(out)):
            raise StepFailedError(f"step {name(point)} ended well, but its rows are not in {out}")
    return left[most:] if most else []


def with_alternations(points: Sequence[Point], count: int) -> list[Point]:
    """The points in turn, `count` times: a drift of the machine meets all of them."""
    return [replace(point, alternation=i) for i in range(1, count + 1) for point in points]
