"""What LoRA costs: the engine without it, stock, ours with default and with tuned configurations, in alternation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lorahost.bench import compare
from lorahost.bench.point import EnginePath, Point
from lorahost.bench.rows import POINT, Row
from lorahost.bench.steps import with_alternations
from lorahost.bench.tables import markdown, short

# path and via
VARIANTS = ("base", "stock", "ours", "ours-tuned", "lora-base", "ours-tuned:http")
METRICS = ("otps_p50", "ttft_p50_ms", "throughput")


def plan(point: Point, variants: Sequence[str], alternations: int, backends: Mapping[str, str]) -> list[Point]:
    """Steps of a retention benchmark.

    Args:
        point: The point; its path is replaced.
        variants: Paths, with `:http` for those through the server.
        alternations: How often all of them are measured in turn.
        backends: MoE backends by path, where it is not the point's.

    Raises:
        ValueError: an unknown variant.
    """
    points = []
    for variant in variants:
        path, _, via = variant.partition(":")
        if variant not in {*VARIANTS, *(f"{v}:http" for v in VARIANTS)} or via not in ("", "http"):
            raise ValueError(f"variant {variant!r}: must be a path, or a path and :http; paths are {VARIANTS[:5]}")
        backend = backends.get(path, point.moe_backend)
        points.append(replace(point, path=_path(path), via="http" if via else "engine", moe_backend=backend))
    return with_alternations(points, alternations)


def _path(name: str) -> EnginePath:
    from lorahost.bench.point import PATHS

    return next(path for path in PATHS if path == name)


def report(rows: Sequence[Row]) -> str:
    """For every point and load: each variant's figures, and its OTPS as a share of the engine without LoRA."""
    blocks = []
    for key, found in compare.groups(rows, POINT).items():
        ways = compare.groups(found, ("path", "via", "moe_backend"))
        base = next((r for way, r in ways.items() if way[:2] == ("base", "engine")), None)
        lines = [["path", "starts", "OTPS p50", "TTFT p50 ms", "tok/s", "OTPS / no LoRA", "TTFT / no LoRA", "errors"]]
        for (path, via, backend), mine in ways.items():
            title = path + (":http" if via == "http" else "") + (f" ({backend})" if backend != "auto" else "")
            runs = {metric: compare.runs_of(mine, metric) for metric in METRICS}
            cells = [_mean(runs[metric]) for metric in METRICS]
            shares = [_share(metric, base, runs) for metric in METRICS[:2]]
            errors = sum(int(row["errors"]) for row in mine)
            lines.append([title, str(len({row["run"] for row in mine})), *cells, *shares, str(errors)])
        point = ", ".join(f"{column} {value}" for column, value in zip(POINT, key, strict=True) if value)
        blocks.append(f"{point}\n\n{markdown(lines)}")
    return "\n\n".join(blocks)


def _mean(runs: compare.Runs) -> str:
    values = [value for run in runs for value in run]
    return short(sum(values) / len(values)) if values else "-"


def _share(metric: str, base: Sequence[Row] | None, runs: Mapping[str, compare.Runs]) -> str:
    reference = compare.runs_of(base, metric) if base else []
    if not reference or not runs[metric]:
        return "-"
    r = compare.ratio(metric, reference, runs[metric])
    return f"{r.value:.3f} ({r.low:.3f} to {r.high:.3f})"
