"""Rows as text: aligned columns for a terminal, or Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

SERVE = (
    ("repeat", "repeat"), ("requests", "requests"), ("errors", "errors"), ("prompt_tokens", "input tok"),
    ("throughput", "tok/s"), ("otps_p50", "OTPS p50"), ("otps_p1", "OTPS p1"), ("ttft_p50_ms", "TTFT p50 ms"),
    ("ttft_p99_ms", "TTFT p99 ms"), ("itl_p50_ms", "ITL p50 ms"), ("itl_p99_ms", "ITL p99 ms"),
)  # fmt: skip


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, numbers to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """The first line is the head."""
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([rows[0], "|" + " --- |" * len(lines[0]), *rows[1:]])


def as_json(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as a JSON list; what was not measured is null, since JSON has no NaN."""
    return json.dumps([{k: None if v != v else v for k, v in row.items()} for row in rows], indent=2)


def short(value: object) -> str:
    """A figure with three or four digits; `-` for none."""
    if not isinstance(value, float):
        return str(value)
    if value != value:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def serve_table(rows: Sequence[Mapping[str, object]]) -> str:
    """One line a repeat, and what went wrong below."""
    lines = [[title for _, title in SERVE], *([short(row[column]) for column, _ in SERVE] for row in rows)]
    wrong = [f"repeat {row['repeat']}: {row['error_kinds']}" for row in rows if row["error_kinds"]]
    return "\n".join([aligned(lines), *wrong])
