"""The commands of `lorahost bench` that read rows and start nothing: tables, charts and comparisons."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from lorahost.bench import compare as comparing
from lorahost.bench import rows, steps
from lorahost.bench import tables as tabulating

CSV = click.Path(dir_okay=False, path_type=Path)
EXTRA = "`pip install -e '.[bench]'` in a checkout of this repository"
_where = click.option("--where", multiple=True, metavar="COLUMN=VALUE", help="Only these rows; may be repeated.")


def fail(message: object) -> NoReturn:
    """Ends the command with 1 and the message on stderr."""
    click.echo(f"error: {message}", err=True)
    sys.exit(1)


def guarded(act: Callable[[], Any]) -> Any:
    """What `act` returns; an error of rows, steps or arguments ends the command."""
    try:
        return act()
    except (rows.RowsError, steps.StepFailedError, ValueError) as error:
        fail(error)


@click.command()
@click.argument("file", type=CSV)
@_where
def tables(file: Path, where: tuple[str, ...]) -> None:
    """Print the tables of the rows in FILE: each engine's OTPS and first tokens, and its share of no LoRA."""
    click.echo(guarded(lambda: tabulating.of_file(file, where)))


@click.command()
@click.argument("file", type=CSV)
@click.option("--out", multiple=True, type=CSV, required=True, help="FILE.svg or FILE.png; may be repeated.")
@_where
@click.option("--bandwidth", default=4.3, show_default=True, help="TB/s of the byte floor.")
def chart(file: Path, out: tuple[Path, ...], where: tuple[str, ...], bandwidth: float) -> None:
    """Draw OTPS and TTFT of the four engines from the rows in FILE, and print the table."""
    from lorahost.bench import chart as charting

    def act() -> None:
        found = charting.selected(rows.read(file), where)
        charting.draw(found, out, bandwidth * 1e12)
        click.echo(charting.table(found))

    try:
        guarded(act)
    except ModuleNotFoundError as error:
        fail(f"{error}; charts need {EXTRA}")


@click.command()
@click.argument("file_a", type=CSV)
@click.argument("file_b", type=CSV)
@click.option("--a", "where_a", multiple=True, metavar="COLUMN=VALUE", help="Only these rows of A; may be repeated.")
@click.option("--b", "where_b", multiple=True, metavar="COLUMN=VALUE", help="Only these rows of B; may be repeated.")
def compare(file_a: Path, file_b: Path, where_a: tuple[str, ...], where_b: tuple[str, ...]) -> None:
    """Ratios B / A with a bootstrap interval; both may be one file with different --a and --b."""

    def act() -> str:
        left = comparing.chosen(rows.read(file_a), where_a)
        right = comparing.chosen(rows.read(file_b), where_b)
        return comparing.text(comparing.compare(left, right))

    click.echo(guarded(act))
