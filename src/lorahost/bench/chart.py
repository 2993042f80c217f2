"""The chart of what LoRA costs: OTPS and TTFT of four engines, with the byte floor."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorahost.bench import compare, floor
from lorahost.bench.formatting import markdown, short
from lorahost.bench.loads import Load
from lorahost.bench.rows import POINT, Row, RowsError
from lorahost.bench.shapes import SHAPES

# path, name in tables, label under the bar, colour
BARS = (
    ("base", "no LoRA", "no LoRA", "#6b7677"),
    ("stock", "LoRA, stock vLLM", "LoRA,\nstock vLLM", "#c0504d"),
    ("ours", "LoRA, lorahost, built-in tiles", "LoRA, lorahost,\nbuilt-in tiles", "#3d7fc1"),
    ("ours-tuned", "LoRA, lorahost, as shipped (tuned tiles)", "LoRA, lorahost,\nas shipped\n(tuned tiles)", "#174a7c"),
)
FLOOR_COLOR = "#b8860b"
PANELS = (("otps_p50", "output tokens per second and request"), ("ttft_p50_ms", "time to first token, ms (median)"))


@dataclass(frozen=True)
class Bar:
    """One path's figure over its repeats, and the same over that without LoRA; see `compare.over_rounds`."""

    path: str
    name: str
    label: str
    color: str
    figure: compare.Spread
    share: compare.Spread
    repeats: int
    starts: int

    @property
    def measured(self) -> bool:
        """Whether there are rows of it."""
        return self.figure.measured


def selected(rows: Sequence[Row], conditions: Sequence[str]) -> list[Row]:
    """The rows of one point through the engine, of the four paths.

    Raises:
        RowsError: none are left, or they are of several points or several ways of one path; the message says which.
    """
    known = {bar[0] for bar in BARS}
    found = [r for r in compare.chosen(rows, conditions) if r["via"] == "engine" and r["path"] in known]
    if not found:
        raise RowsError("no row of the four paths, measured in the engine, fits the conditions")
    for column in POINT:
        if len(values := sorted({row[column] for row in found})) > 1:
            raise RowsError(f"rows of several points: {column} is {values}; choose one with --where {column}=VALUE")
    for path, mine in compare.groups(found, ("path",)).items():
        for column in ("moe_backend", "extra", "slots"):
            if len(values := sorted({row[column] for row in mine})) > 1:
                raise RowsError(f"path {path[0]} has several {column} {values}; choose with --where {column}=VALUE")
    return found


def bars(rows: Sequence[Row], metric: str) -> list[Bar]:
    """The four bars of a metric, in their order."""
    found = []
    base = [row for row in rows if row["path"] == "base"]
    for path, name, label, color in BARS:
        mine = [row for row in rows if row["path"] == path]
        backend = next((row["moe_backend"] for row in mine if row["moe_backend"] != "auto"), "")
        if backend:
            name, label = f"{name} ({backend})", f"{label},\n{backend}"
        figure, share = compare.spread(mine, metric), compare.over_rounds(metric, mine, base)
        found.append(Bar(path, name, label, color, figure, share, len(mine), len({row["run"] for row in mine})))
    return found


def otps_floor(rows: Sequence[Row], copy_rate: float = floor.COPY_RATE) -> float:
    """OTPS of the measured engine without LoRA plus the reading of LoRA weights; NaN without such an engine."""
    base = next(bar for bar in bars(rows, "otps_p50") if bar.path == "base")
    row = next((r for r in rows if r["path"] != "base"), None)
    load = Load.parse(rows[0]["load"])
    if not base.measured or row is None or not load.concurrency or row["model"] not in SHAPES:
        return math.nan
    read = floor.lora_bytes(
        SHAPES[row["model"]], int(row["layers"]), int(row["rank"]), tuple(row["targets"].split("+")),
        int(row["adapters"]), load.concurrency,
    )  # fmt: skip
    return floor.otps_limit(base.figure.value, read, copy_rate)


def title(row: Row) -> str:
    """The point in one line."""
    load = Load.parse(row["load"])
    flight = f"{load.concurrency} requests in flight" if load.concurrency else f"{load.rate:g} requests/s"
    adapters = f"{row['adapters']} rank-{row['rank']} adapters on {row['targets'].replace('+', ' and ')}"
    return f"{row['model']} shape, {row['input']} tokens in, {row['output']} out, {flight}, {adapters}"


def source(rows: Sequence[Row]) -> str:
    """Where the rows come from."""
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    dates = sorted({row["date"][:10] for row in rows})
    spread = "random weights" if rows[0]["weights"] == "spread" else f"random weights, {rows[0]['weights']}"
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{rows[0]['gpu']}, {rows[0]['versions']}, {spread}, commit {commits}, {days}"


def draw(rows: Sequence[Row], targets: Sequence[Path], copy_rate: float = floor.COPY_RATE) -> None:
    """Draws the chart into files, whose suffixes (.svg, .png) are the formats.

    Raises:
        RowsError: a file's suffix is neither.
    """
    import matplotlib

    if wrong := [path for path in targets if path.suffix not in (".svg", ".png")]:
        raise RowsError(f"{wrong[0]}: the chart is written as .svg or .png")
    # the same rows give the same file
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "lorahost", "svg.fonttype": "none", "font.size": 9})
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4.2), dpi=100, layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, (metric, label) in zip(axes, PANELS, strict=True):
        _panel(axis, bars(rows, metric), label)
    limit = otps_floor(rows, copy_rate)
    if not math.isnan(limit):
        _floor_line(axes[0], limit, copy_rate)
    figure.suptitle(title(rows[0]), fontsize=10)
    figure.supxlabel(f"{note(rows)}\n{source(rows)}", fontsize=7, color="#555555")
    for path in targets:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})


def note(rows: Sequence[Row]) -> str:
    """What bars and lines are."""
    measured = [bar for bar in bars(rows, "otps_p50") if bar.measured]
    repeats = _counted({bar.repeats for bar in measured}, "repeat")
    starts = _counted({bar.starts for bar in measured}, "engine start")
    bar = f"Bars: median of {repeats} of {starts} each; lines: smallest and largest."
    return f"{bar} Per cent: of the engine without LoRA."


def _counted(counts: Collection[int], what: str) -> str:
    low, high = min(counts), max(counts)
    return f"{low if low == high else f'{low} to {high}'} {what}{'' if high == 1 else 's'}"


def _panel(axis: Any, found: Sequence[Bar], label: str) -> None:
    highest = max((bar.figure.high for bar in found if bar.measured), default=1.0)
    for place, bar in enumerate(found):
        if not bar.measured:
            axis.text(place, highest * 0.02, "not measured", rotation=90, ha="center", va="bottom", color="#888888")
            continue
        value, low, high = bar.figure.value, bar.figure.low, bar.figure.high
        spread = [[value - low], [high - value]]
        axis.bar(place, value, 0.66, color=bar.color, yerr=spread, ecolor="#222222", capsize=3, gid=f"bar-{bar.path}")
        share = "" if bar.path == "base" or not bar.share.measured else f"\n{bar.share.value:.0%}"
        # at the bar's foot: above it a long line would carry the label away from its bar
        foot = highest * 0.02
        axis.text(
            place, foot, short(value) + share, ha="center", va="bottom", fontsize=8.5, color="white", weight="bold"
        )
    axis.set_ylim(0, highest * 1.14)
    axis.set_xlim(-0.6, len(found) - 0.4)
    axis.set_xticks(range(len(found)), [bar.label for bar in found], fontsize=7.5)
    axis.set_ylabel(label)
    axis.spines[["top", "right"]].set_visible(False)
    axis.yaxis.grid(True, color="#e5e5e5")
    axis.set_axisbelow(True)


def _floor_line(axis: Any, limit: float, copy_rate: float) -> None:
    text = f"byte floor {limit:.0f}: no LoRA + LoRA weights read at {copy_rate / 1e12:g} TB/s"
    axis.plot([0.55, 3.45], [limit, limit], "--", color=FLOOR_COLOR, linewidth=1.3, gid="byte-floor", label=text)
    axis.legend(loc="upper right", frameon=False, fontsize=7, borderaxespad=0)


def table(rows: Sequence[Row]) -> str:
    """The chart's figures as Markdown, in brackets the smallest and largest; what was not measured is said so."""
    lines = [["engine", "OTPS a request", "of no LoRA", "TTFT median, ms", "of no LoRA", "engine starts"]]
    both = [bars(rows, metric) for metric, _ in PANELS]
    for otps, ttft in zip(*both, strict=True):
        cells = [otps.name]
        for bar in (otps, ttft):
            share = f"{bar.share.value:.0%}" if bar.share.measured else "-"
            cells += [bar.figure.text() if bar.measured else "not measured", share]
        lines.append([*cells, str(otps.starts)])
    return markdown(lines)
