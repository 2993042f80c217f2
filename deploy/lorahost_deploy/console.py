"""What a person watches while a verb works; everything goes to standard error, results go to standard output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click


def say(text: str) -> None:
    """One line."""
    click.echo(text, err=True)


@contextmanager
def waiting(text: str) -> Iterator[Callable[[str], None]]:
    """Shows that something goes on; call what it yields with each new state."""
    if not sys.stderr.isatty():
        last = ""

        def line(state: str) -> None:
            nonlocal last
            if state != last:
                say(f"{text}: {state}")
            last = state

        yield line
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as status:
        yield lambda state: status.update(f"{text}: {state}")


@contextmanager
def uploading(text: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar in bytes; call what it yields with the bytes that went since the last call."""
    if not sys.stderr.isatty():
        say(f"{text}: {total / 1e6:.1f} MB")
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(text), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(text, total=total)
        yield lambda count: progress.advance(task, count)


def table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """Rows as aligned columns."""
    lines = [columns, *(tuple("-" if cell in (None, "") else str(cell) for cell in row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
