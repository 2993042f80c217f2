"""Ratios of engines that were measured in turn; standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from lorahost.bench import compare
from lorahost.bench.rows import Row, number
from lorahost.bench.tables import markdown, short
from lorahost.bench.together_plan import Job, Spec, owners, rows_of

RATIOS = (("otps_p50", "OTPS"), ("ttft_p50_ms", "TTFT"))


def table(engines: Sequence[Spec], jobs: Sequence[Job], found: Sequence[Row]) -> str:
    """For every job: each engine's figures, and their ratios to the engines without LoRA and of stock vLLM, and to
    those that are also measured through the server.

    A ratio is that of the means over the rounds that both have, in brackets the smallest and largest of one round.
    """
    blocks = []
    for job in jobs:
        # the engine without LoRA is what base traffic is compared with, too
        mine = owners(engines, jobs, job)
        sides = {s.name: rows_of(found, s, job) for s in engines if s in mine or s.point.path == "base"}
        sides = {name: side for name, side in sides.items() if side}
        references = [s.name for s in engines if s.name in sides and _is_reference(s, engines)]
        head = ["engine", "rounds", "OTPS p50", "TTFT p50 ms", "tok/s"]
        lines = [[*head, *(f"{title} / {name}" for _, title in RATIOS for name in references), "errors"]]
        for name, side in sides.items():
            figures = [_mean(side, metric) for metric in ("otps_p50", "ttft_p50_ms", "throughput")]
            ratios = [_ratio(metric, side, sides[other]) for metric, _ in RATIOS for other in references]
            errors = sum(int(row["errors"]) for row in side)
            lines.append([name, str(len(_rounds(side))), *figures, *ratios, str(errors)])
        if sides:
            blocks.append(f"{job}\n\n{markdown(lines)}")
    return "\n\n".join(blocks) or "no rows"


def _is_reference(spec: Spec, engines: Sequence[Spec]) -> bool:
    if spec.point.via == "http":
        return False
    return spec.point.path in ("base", "stock") or any(replace(spec.point, via="http") == s.point for s in engines)


def _rounds(side: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    return compare.groups(side, ("gpu", "alternation"))


def _values(side: Sequence[Row], metric: str) -> list[float]:
    return [value for row in side if (value := number(row, metric)) == value]


def _mean(side: Sequence[Row], metric: str) -> str:
    values = _values(side, metric)
    return short(fmean(values)) if values else "-"


def _ratio(metric: str, side: Sequence[Row], reference: Sequence[Row]) -> str:
    mine, other = _rounds(side), _rounds(reference)
    pairs = [(_values(mine[key], metric), _values(other[key], metric)) for key in mine if key in other]
    means = [(fmean(a), fmean(b)) for a, b in pairs if a and b]
    if not means:
        return "-"
    each = [a / b for a, b in means]
    value = fmean(a for a, _ in means) / fmean(b for _, b in means)
    return f"{value:.3f} ({min(each):.3f} to {max(each):.3f})"
