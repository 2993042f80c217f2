"""What LoRA costs: the engine without it, stock, ours with built-in and with tuned tiles, in alternation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lorahost.bench.point import PATHS, EnginePath, Point
from lorahost.bench.steps import with_alternations

# path and via
VARIANTS = ("base", "stock", "ours", "ours-tuned", "lora-base", "ours-tuned:http")


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
    return next(path for path in PATHS if path == name)
