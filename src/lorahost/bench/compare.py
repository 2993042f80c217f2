"""Two sets of rows: medians over rounds, or means with a bootstrap interval; standard library only."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lorahost.bench.formatting import aligned, short
from lorahost.bench.rows import POINT, Row, RowsError, number
from lorahost.bench.timings import percentile

METRICS = ("otps_p50", "throughput", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
SAMPLES = 4000
COVERAGE = 95.0
Runs = list[list[float]]


@dataclass(frozen=True)
class Ratio:
    """B over A: means of all repeats, and the interval of their ratio; `starts` is the smaller number of starts."""

    metric: str
    a: float
    b: float
    low: float
    high: float
    starts: int

    @property
    def value(self) -> float:
        """B / A."""
        return self.b / self.a

    @property
    def differs(self) -> bool:
        """Whether the interval leaves 1 out."""
        return self.low > 1 or self.high < 1

    @property
    def verdict(self) -> str:
        """The difference in per cent, or that there is none to be seen."""
        if not self.differs:
            return "no difference"
        return f"{(self.value - 1) * 100:+.1f} %" + (" (one start)" if self.starts == 1 else "")


def runs_of(rows: Sequence[Row], metric: str) -> Runs:
    """A metric's values by engine start; starts without any are left out."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if not math.isnan(value := number(row, metric)):
            found[row["run"]].append(value)
    return list(found.values())


@dataclass(frozen=True)
class Spread:
    """A figure over repeats or rounds: the median, and the smallest and largest; NaN without any."""

    value: float
    low: float
    high: float

    @property
    def measured(self) -> bool:
        """Whether there is any."""
        return not math.isnan(self.value)

    def text(self, digits: int | None = None) -> str:
        """`median (smallest to largest)`, with so many digits after the point or as `short` does; `-` without any."""
        if not self.measured:
            return "-"
        value, low, high = (
            short(v) if digits is None else f"{v:.{digits}f}" for v in (self.value, self.low, self.high)
        )
        return f"{value} ({low} to {high})"


NOTHING = Spread(math.nan, math.nan, math.nan)


def spread(rows: Sequence[Row], metric: str) -> Spread:
    """A metric over all rows that have it: one stalled repeat moves the smallest or the largest, not the median."""
    values = [value for row in rows if not math.isnan(value := number(row, metric))]
    return Spread(statistics.median(values), min(values), max(values)) if values else NOTHING


def rounds(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Rows by the round in which they were measured."""
    return groups(rows, ("gpu", "alternation"))


def over_rounds(metric: str, rows: Sequence[Row], reference: Sequence[Row]) -> Spread:
    """Rows over reference: the ratio of medians over the rounds that both have, the smallest and largest of one round.

    In brackets stand ratios within a round, so that a round in which one side stalled stays to be seen.
    """
    mine, other = rounds(rows), rounds(reference)
    both = [(mine[key], other[key]) for key in mine if key in other]
    both = [(a, b) for a, b in both if spread(a, metric).measured and spread(b, metric).measured]
    if not both:
        return NOTHING
    each = [spread(a, metric).value / spread(b, metric).value for a, b in both]
    above, below = (spread([row for side in sides for row in side], metric) for sides in zip(*both, strict=True))
    return Spread(above.value / below.value, min(each), max(each))


def ratio(metric: str, a: Runs, b: Runs, seed: int = 0) -> Ratio:
    """The ratio of means, which one stalled repeat moves and widens, with its 95 % bootstrap interval.

    Starts are drawn first and repeats within them, since repeats of one start are more alike than starts. With one
    start on a side the interval knows only the spread of its repeats.
    """
    rng = random.Random(seed)

    def mean(runs: Runs) -> float:
        return statistics.fmean(value for run in runs for value in run)

    def again(runs: Runs) -> float:
        return mean([rng.choices(run, k=len(run)) for run in rng.choices(runs, k=len(runs))])

    drawn = [again(b) / again(a) for _ in range(SAMPLES)]
    outside = (100 - COVERAGE) / 2
    low, high = percentile(drawn, outside), percentile(drawn, 100 - outside)
    return Ratio(metric, mean(a), mean(b), low, high, min(len(a), len(b)))


def same_point(a: Sequence[Row], b: Sequence[Row]) -> None:
    """Checks that both sides measured the same points.

    Raises:
        RowsError: a side is empty, or a column of the point has other values; the message names them.
    """
    for name, rows in (("A", a), ("B", b)):
        if not rows:
            raise RowsError(f"{name} has no rows for this comparison")
    for column in POINT:
        left, right = {row[column] for row in a}, {row[column] for row in b}
        if left != right:
            raise RowsError(f"different points are not compared: {column} is {sorted(left)} in A, {sorted(right)} in B")


def groups(rows: Sequence[Row], keys: Sequence[str]) -> dict[tuple[str, ...], list[Row]]:
    """Rows by the values of `keys`, in the order of their first row."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def compare(a: Sequence[Row], b: Sequence[Row]) -> dict[tuple[str, ...], list[Ratio]]:
    """Ratios of every point that both sides have.

    Raises:
        RowsError: the points differ, or a side mixes several paths, backends or other ways at one point.
    """
    same_point(a, b)
    left, right = groups(a, POINT), groups(b, POINT)
    if left.keys() != right.keys():
        raise RowsError(f"different points are not compared: only on one side {sorted(left.keys() ^ right.keys())}")
    for name, side in (("A", left), ("B", right)):
        for rows in side.values():
            for column in ("path", "via", "slots", "kernels", "moe_backend", "extra"):
                if len(values := sorted({row[column] for row in rows})) > 1:
                    raise RowsError(f"{name} mixes {column} {values}: choose one (--a or --b {column}=...)")
    found = {}
    for key in left:
        pairs = ((metric, runs_of(left[key], metric), runs_of(right[key], metric)) for metric in METRICS)
        found[key] = [ratio(metric, x, y) for metric, x, y in pairs if x and y]
    return found


def chosen(rows: Sequence[Row], conditions: Sequence[str]) -> list[Row]:
    """Rows whose columns have the values that `column=value` conditions name.

    Raises:
        RowsError: no such column, or no `=`.
    """
    kept = list(rows)
    for condition in conditions:
        column, separator, value = condition.partition("=")
        if not separator or (kept and column not in kept[0]):
            raise RowsError(f"condition {condition!r}: must be COLUMN=VALUE with a column of the rows")
        kept = [row for row in kept if row[column] == value]
    return kept


def text(found: dict[tuple[str, ...], list[Ratio]]) -> str:
    """One block a point."""
    blocks = []
    for key, ratios in found.items():
        point = ", ".join(f"{column} {value}" for column, value in zip(POINT, key, strict=True) if value)
        lines = [["metric", "A", "B", "B / A", "95 % interval", "verdict"]]
        for r in ratios:
            interval = f"{r.low:.3f} to {r.high:.3f}"
            lines.append([r.metric, short(r.a), short(r.b), f"{r.value:.3f}", interval, r.verdict])
        starts = min((r.starts for r in ratios), default=0)
        blocks.append(f"{point}\n{aligned(lines)}\nengine starts on the smaller side: {starts}")
    return "\n\n".join(blocks)
