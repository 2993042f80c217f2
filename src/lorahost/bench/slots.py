"""More adapters than slots: the same traffic on fewer slots than adapters, and on one slot each, through the server."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lorahost.bench import compare
from lorahost.bench.formatting import markdown, short
from lorahost.bench.loads import Load
from lorahost.bench.point import Point
from lorahost.bench.rows import Row, number
from lorahost.bench.steps import with_alternations

IN_FLIGHT = 4
CLOSED = 16
CALIBRATION = "slots-rate"


def calibration(point: Point, rate: float = 0.0) -> Point:
    """The step that says how long a request takes with about four in flight: one slot for each adapter.

    Args:
        point: What is measured.
        rate: Of an open loop, in requests a second; 0 for a closed loop of four.
    """
    load = Load(rate=rate) if rate else Load(concurrency=IN_FLIGHT)
    return replace(point, benchmark=CALIBRATION, via="http", slots=point.adapters, loads=(load,), alternation=1)


def suggested_rate(rows: Sequence[Row]) -> float:
    """Requests a second at which the open loop is calibrated: Little's law on the closed loop's latencies.

    Raises:
        ValueError: there are no rows of the calibration's closed loop.
    """
    return _rate(rows, "closed:", "latency_p50_ms")


def rate_of(rows: Sequence[Row]) -> float:
    """Requests a second that keep four in flight on average: Little's law on the calibration's open loop.

    A request takes longer there than in the closed loop: others' prompts are prefilled in the middle of its answer.

    Raises:
        ValueError: there are no rows of the calibration's open loop.
    """
    return _rate(rows, "poisson:", "latency_mean_ms")


def _rate(rows: Sequence[Row], kind: str, metric: str) -> float:
    mine = [row for row in rows if row["benchmark"] == CALIBRATION and row["load"].startswith(kind)]
    latencies = _values(mine, metric)
    if not latencies:
        raise ValueError(f"there are no rows of the calibration with {kind}N, from which the rate comes")
    return float(f"{IN_FLIGHT * 1e3 / statistics.fmean(latencies):.3g}")


def _values(rows: Sequence[Row], metric: str) -> list[float]:
    return [value for row in rows if not math.isnan(value := number(row, metric))]


def check_few(point: Point, few: int) -> None:
    """Checks the smaller number of slots.

    Raises:
        ValueError: it is not below the number of adapters.
    """
    if not 1 <= few < point.adapters:
        raise ValueError(f"slots {few}: must be between 1 and {point.adapters - 1}, fewer than adapters")


def plan(point: Point, few: int, rate: float, alternations: int) -> list[Point]:
    """Steps with a slot for each adapter and with `few`, both loads in each.

    Raises:
        ValueError: `few` is not below the number of adapters.
    """
    check_few(point, few)
    loads = (Load(rate=rate), Load(concurrency=CLOSED))
    both = [replace(point, benchmark="slots", via="http", slots=n, loads=loads) for n in (point.adapters, few)]
    return with_alternations(both, alternations)


@dataclass(frozen=True)
class Claim:
    """One of the three that fewer slots must hold."""

    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        """Whether the value is within the limit; not for NaN."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def claims(rows: Sequence[Row], adapters: int, few: int) -> list[Claim]:
    """What the rows say of each claim.

    Raises:
        RowsError: rows of one of the sides are missing, or their points differ.
    """
    opened, closed = (_measured(rows, adapters, kind) for kind in ("poisson:", "closed:"))

    def sides(found: list[Row]) -> tuple[list[Row], list[Row]]:
        many, less = ([r for r in found if r["slots"] == str(n)] for n in (adapters, few))
        compare.same_point(many, less)
        return many, less

    def quotient(found: list[Row], metric: str) -> float:
        many, less = sides(found)
        return compare.ratio(metric, compare.runs_of(many, metric), compare.runs_of(less, metric)).value

    many, less = sides(closed)
    answer = sum(number(row, "latency_p50_ms") for row in many) / len(many)
    longest = max(number(row, "ttft_max_ms") for row in less)
    return [
        Claim(f"open loop: median TTFT, {few} slots / {adapters}", quotient(opened, "ttft_p50_ms"), 1.3),
        Claim(f"open loop: p99 TTFT, {few} slots / {adapters}", quotient(opened, "ttft_p99_ms"), 3.0),
        Claim(
            f"closed loop at {CLOSED}: throughput, {few} slots / {adapters}", quotient(closed, "throughput"), 0.85, True
        ),
        Claim("closed loop: longest wait for a first token, in answers", longest / answer, 2.0),
    ]


def in_flight(rows: Sequence[Row], adapters: int, few: int) -> str:
    """How many requests the open loop really had in flight on each side, the mean over its rows; `-` if none says."""
    opened = _measured(rows, adapters, "poisson:")
    sides = []
    for n in (adapters, few):
        values = _values([row for row in opened if row["slots"] == str(n)], "in_flight")
        sides.append(f"{short(statistics.fmean(values) if values else math.nan)} on {n} slots")
    return f"open loop: in flight on average {', '.join(sides)}; meant are {IN_FLIGHT} on {adapters}"


def _measured(rows: Sequence[Row], adapters: int, kind: str) -> list[Row]:
    mine = [row for row in rows if row["benchmark"] == "slots" and row["adapters"] == str(adapters)]
    return [row for row in mine if row["load"].startswith(kind)]


def report(found: Sequence[Claim]) -> str:
    """The claims as a table."""
    lines = [["claim", "measured", "limit", "holds"]]
    for c in found:
        lines.append(
            [c.what, short(c.value), f"{'>=' if c.at_least else '<='} {c.limit:g}", "yes" if c.holds else "NO"]
        )
    return markdown(lines)
