"""Ratios of engines that were measured in turn; standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lorahost.bench import compare
from lorahost.bench.formatting import markdown
from lorahost.bench.rows import Row
from lorahost.bench.together_plan import Job, Spec, owners, rows_of

RATIOS = (("otps_p50", "OTPS"), ("ttft_p50_ms", "TTFT"))


def table(engines: Sequence[Spec], jobs: Sequence[Job], found: Sequence[Row]) -> str:
    """For every job: each engine's figures, and their ratios to the engines without LoRA and of stock vLLM, and to
    those that are also measured through the server.

    A figure is the median over all repeats, a ratio that of the medians over the rounds that both have; in brackets
    are the smallest and largest of one repeat or round.
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
            figures = [compare.spread(side, metric).text() for metric in ("otps_p50", "ttft_p50_ms", "throughput")]
            ratios = [
                compare.over_rounds(metric, side, sides[other]).text(3) for metric, _ in RATIOS for other in references
            ]
            errors = sum(int(row["errors"]) for row in side)
            lines.append([name, str(len(compare.rounds(side))), *figures, *ratios, str(errors)])
        if sides:
            blocks.append(f"{job}\n\n{markdown(lines)}")
    return "\n\n".join(blocks) or "no rows"


def _is_reference(spec: Spec, engines: Sequence[Spec]) -> bool:
    if spec.point.via == "http":
        return False
    return spec.point.path in ("base", "stock") or any(replace(spec.point, via="http") == s.point for s in engines)
