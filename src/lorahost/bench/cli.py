"""`lorahost bench`: load over HTTP, what LoRA costs, more adapters than slots; `row_commands` has the rest."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from lorahost.bench import formatting, row_commands, rows, steps, tables
from lorahost.bench import retention as retaining
from lorahost.bench import slots as slotting
from lorahost.bench import together as together_run
from lorahost.bench.loads import Choice, Load
from lorahost.bench.point import Point
from lorahost.bench.row_commands import CSV, EXTRA, fail, guarded
from lorahost.bench.shapes import SHAPES
from lorahost.bench.together_options import OPTIONS, ROOM, Option, Options, click_arguments
from lorahost.bench.together_slots import SlotsTogether

RESULTS = Path("bench/results")


@click.group()
def bench() -> None:
    """Measure: servers over HTTP, and what LoRA costs on one GPU."""


@bench.command()
@click.option("--url", envvar="LORAHOST_URL", default="http://localhost:8080", show_default=True)
@click.option(
    "--api", type=click.Choice(["completions", "chat", "invocations"]), default="completions", show_default=True
)
@click.option(
    "--adapter-by",
    type=click.Choice(["header", "model"]),
    default="header",
    show_default=True,
    help="How /invocations is told the adapter.",
)
@click.option("--base", default=None, help="The base model's name; by default the first that /v1/models lists.")
@click.option(
    "--adapters", "count", default=8, show_default=True, help="So many of those that /v1/models lists; 0: base."
)
@click.option("--adapter", "named", multiple=True, help="An adapter by name; may be repeated, instead of --adapters.")
@click.option("--choice", type=click.Choice(["round-robin", "zipf"]), default="round-robin", show_default=True)
@click.option("--zipf", default=1.0, show_default=True, help="Exponent of --choice zipf.")
@click.option("--input", "input_", type=click.IntRange(1), default=1600, show_default=True, help="Tokens of a prompt.")
@click.option("--output", type=click.IntRange(1), default=600, show_default=True, help="Tokens of an answer.")
@click.option("--concurrency", type=click.IntRange(1), default=16, show_default=True, help="Closed loop.")
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), help="Open loop: requests a second, a Poisson process."
)
@click.option("--requests", type=click.IntRange(1), help="Of a repeat; by default two rounds, or 64 in an open loop.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option("--warmup", type=click.IntRange(0), default=1, show_default=True, help="Rounds before the first repeat.")
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Prompts from a text file.")
@click.option("--vocab", type=click.IntRange(100), default=30000, show_default=True, help="Random ids lie below it.")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), default=600.0, show_default=True, help="Seconds a request."
)
@click.option("--body", default="{}", help="JSON object of further fields of each request.")
@click.option("--label", default="serve", show_default=True, help="The rows' path, to tell servers apart.")
@click.option("--gpu", default="", help="The server's GPU, for the rows.")
@click.option("--csv", "csv_", type=CSV, help="Append the rows to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON instead of a table.")
def serve(**options: Any) -> None:
    """Load a running server: lorahost, `vllm serve`, or any OpenAI or SageMaker style server.

    Exits with 1 if any request failed; the errors are counted by kind in the rows.
    """
    try:
        from lorahost.bench import serve_command
        from lorahost.bench.http_client import ServerError
    except ModuleNotFoundError as error:
        fail(f"{error}; load over HTTP needs {EXTRA}")
    try:
        found = serve_command.run(options, lambda line: click.echo(line, err=True))
    except (ServerError, ValueError) as error:
        fail(error)
    if options["csv_"]:
        guarded(lambda: rows.append(options["csv_"], found))
    click.echo(formatting.as_json(found) if options["as_json"] else formatting.serve_table(found))
    sys.exit(1 if any(row["errors"] for row in found) else 0)


def _point(command: Callable[..., None]) -> Callable[..., None]:
    """The options of commands that start engines."""
    options = (
        click.option("--model", type=click.Choice(sorted(SHAPES)), default="gpt-oss-20b", show_default=True),
        click.option("--layers", default=0, help="Fewer layers than the model has."),
        click.option("--input", "input_", default=1600, show_default=True, help="Tokens of a prompt."),
        click.option("--output", default=600, show_default=True, help="Tokens of an answer."),
        click.option("--rank", default=32, show_default=True),
        click.option("--repeats", type=int, help="Of each load in a step; 3, or 1 with --together."),
        click.option("--alternations", default=3, show_default=True, help="How often all are measured in turn."),
        click.option("--spec", type=click.Choice(["none", "ngram", "synthetic"]), default="none", show_default=True),
        click.option("--moe-backend", default="auto", show_default=True),
        click.option("--extra", default="{}", help="JSON object of engine arguments and LORAHOST_* variables."),
        click.option("--commit", default="", help="What is measured, where there is no checkout."),
        click.option("--max-steps", default=0, help="Stop after so many engine starts; run again to go on."),
        click.option("--work", type=click.Path(file_okay=False, path_type=Path), help="Keeps models and adapters."),
        click.option("--plan", "only_plan", is_flag=True, help="Say which steps are left, and run none."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _make_point(o: dict[str, Any], **more: Any) -> Point:
    extra = json.loads(o["extra"])
    if not isinstance(extra, dict):
        raise ValueError(f"extra {o['extra']!r}: must be a JSON object")
    alphabet = 64 if o["spec"] == "synthetic" else 0
    given = {"repeats": o["repeats"]} if o["repeats"] is not None else {}
    return Point(
        model=o["model"], layers=o["layers"], input=o["input_"], output=o["output"], rank=o["rank"],
        spec=o["spec"], alphabet=alphabet, moe_backend=o["moe_backend"], extra=extra,
        commit=o["commit"], **{"path": "ours", **more, **given},
    )  # fmt: skip


def _run(plan: list[Point], out: Path, o: dict[str, Any]) -> list[Point]:
    """Runs a plan, or says what is left of it; returns what is missing afterwards."""
    if o["only_plan"]:
        left = [point for point in plan if not steps.done(point, steps.read(out))]
        for point in left:
            click.echo(" ".join(steps.command(point, out, o["work"])))
        return left
    left = steps.run(plan, out, work=o["work"], most=o["max_steps"], say=click.echo)
    if left:
        click.echo(f"{len(left)} steps are left; run this again")
    return left


def _together(command: Callable[..., None], options: Sequence[Option] = OPTIONS) -> Callable[..., None]:
    """--together and the options that need it."""
    for option in reversed(options):
        command = click.option(f"--{option.name}", **click_arguments(option))(command)
    command = click.option("--requests", default=0, help="Of the widest load's repeat; 0: two rounds.")(command)
    return click.option("--together", is_flag=True, help="All engines at once on one GPU; see the options below.")(
        command
    )


def _slots_together(command: Callable[..., None]) -> Callable[..., None]:
    return _together(command, [option for option in OPTIONS if option.name in ROOM])


def _no_stray_options(together: bool) -> None:
    """Options of the other way of measuring would be ignored."""
    context = click.get_current_context()
    only = (
        {"variants", "backend", "max_steps", "only_plan"} if together else {o.name.replace("-", "_") for o in OPTIONS}
    )
    for parameter in context.command.params:
        if parameter.name in only and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{parameter.opts[0]} is {'not for' if together else 'only for'} --together")


def _measure_together(o: dict[str, Any]) -> int:
    loads = tuple(Load.parse(text) for text in o["loads"].split(","))
    more = {"loads": loads, "repeats": 1, "warmup": 1, "benchmark": "together"}
    point = _make_point(o, adapters=o["adapters"], requests=o["requests"], **more)
    return together_run.report(together_run.Together(point, Options.of(o), click.echo).run(), click.echo)


@bench.command()
@click.option(
    "--variants", default=",".join(retaining.VARIANTS), show_default=True, help="Paths; PATH:http: through the server."
)
@click.option("--backend", multiple=True, metavar="PATH=BACKEND", help="MoE backend of one path.")
@click.option("--adapters", default=8, show_default=True)
@click.option("--loads", default="closed:16", show_default=True, help="Comma-separated closed:N or poisson:R.")
@click.option("--out", type=CSV, help="Default: retention.csv, or together.csv, in bench/results.")
@_point
@_together
def retention(
    variants: str, backend: tuple[str, ...], adapters: int, loads: str, out: Path | None, together: bool, **options: Any
) -> None:
    """What LoRA costs on this GPU: no LoRA, stock, ours, ours tuned, in alternation. One engine start is one step.

    With --together all engines start at the same time, with a small KV cache each, and are measured in turn.
    """
    _no_stray_options(together)
    if together:
        out = out or RESULTS / "together.csv"
        sys.exit(guarded(lambda: _measure_together({**options, "adapters": adapters, "loads": loads, "out": out})))
    out = out or RESULTS / "retention.csv"

    def act() -> None:
        pairs = [item.partition("=") for item in backend]
        point = _make_point(options, adapters=adapters, loads=tuple(Load.parse(text) for text in loads.split(",")))
        backends = {path: value for path, _, value in pairs}
        _run(retaining.plan(point, variants.split(","), options["alternations"], backends), out, options)
        if not options["only_plan"] and (found := [r for r in steps.read(out) if r["benchmark"] == "retention"]):
            click.echo(tables.report(found))

    guarded(act)


def _measure_slots(o: dict[str, Any], path: str, few: int) -> int:
    more = {key: o[key] for key in ("adapters", "requests", "choice")}
    more |= {"path": path, "repeats": 1, "warmup": 1}
    options = Options.of({option.name.replace("-", "_"): option.default for option in OPTIONS} | o)
    run = SlotsTogether(_make_point(o, **more), few, options, click.echo)
    return together_run.report(run.run(), click.echo)


@bench.command()
@click.option("--adapters", default=16, show_default=True)
@click.option("--slots", default=8, show_default=True, help="Fewer than adapters.")
@click.option("--path", type=click.Choice(["stock", "ours", "ours-tuned"]), default="ours", show_default=True)
@click.option("--choice", type=click.Choice(["round-robin", "zipf"]), default="round-robin", show_default=True)
@click.option("--out", type=CSV, default=RESULTS / "slots.csv", show_default=True)
@_point
@_slots_together
def slots(adapters: int, slots: int, path: str, choice: Choice, out: Path, together: bool, **options: Any) -> None:
    """More adapters than slots, through the server: open loop with 4 in flight, closed loop at 16.

    With --together both servers start at the same time, with a small KV cache each, and are measured in turn.
    """
    _no_stray_options(together)
    if together:
        given = {**options, "adapters": adapters, "choice": choice, "out": out}
        sys.exit(guarded(lambda: _measure_slots(given, path, slots)))

    def found_rows() -> list[rows.Row]:
        return [row for row in steps.read(out) if row["choice"] == choice]

    def act() -> bool:
        point = _make_point(options, adapters=adapters, path=path, choice=choice)
        if _run([slotting.calibration(point)], out, options):
            return True
        if _run([slotting.calibration(point, slotting.suggested_rate(found_rows()))], out, options):
            return True
        rate = slotting.rate_of(found_rows())
        if _run(slotting.plan(point, slots, rate, options["alternations"]), out, options):
            return True
        measured = found_rows()
        found = slotting.claims(measured, adapters, slots)
        click.echo(f"{slotting.in_flight(measured, adapters, slots)}\n\n{slotting.report(found)}")
        return all(claim.holds for claim in found)

    sys.exit(0 if guarded(act) else 1)


for command in (row_commands.tables, row_commands.chart, row_commands.compare):
    bench.add_command(command)
