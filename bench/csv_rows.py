"""Rows of the benchmarks' CSV files."""

import csv
from collections.abc import Sequence
from pathlib import Path


def append(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Adds rows to a file, with its header if it is new."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as f:
        writer = csv.writer(f)
        if new:
            writer.writerow(columns)
        writer.writerows(rows)
