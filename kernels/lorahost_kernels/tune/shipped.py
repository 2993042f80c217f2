"""Where a run begins besides its own file: the points that are in use on this GPU, of other models, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from lorahost_kernels.tune.writer import Result, results_of
from lorahost_kernels.tuned import load
from lorahost_kernels.tuned.lines import ConfigError
from lorahost_kernels.tuned.schema import TunedFile, read
from lorahost_kernels.tuned.shape import ModelShape

FAR = 99.0  # doublings


def starts(
    gpu: str, shape: ModelShape, environ: Mapping[str, str], say: Callable[[str], None]
) -> tuple[list[Result], list[Result]]:
    """(the shape's own points, other models' with the most similar last) of the files that an engine would find.

    Args:
        gpu: Its name.
        shape: What is tuned.
        environ: Has LORAHOST_CONFIG_DIR or not.
        say: Takes a line for each file that can't be read, which is left out.
    """
    where = load.folder(environ)
    found: list[TunedFile] = []
    for path in load.files(where, gpu) if where else ():
        try:
            found.append(read(path))
        except ConfigError as error:
            say(f"no start from {path.name}: {error}")
    found = [file for file in found if load.gpu_key(file.gpu) == load.gpu_key(gpu)]
    ordered = sorted(found, key=lambda file: unlike(file, shape), reverse=True)
    own = [result for file in ordered if not unlike(file, shape) for result in results_of(file)]
    return own, [result for file in ordered if unlike(file, shape) for result in results_of(file)]


def unlike(file: TunedFile, shape: ModelShape) -> float:
    """How far a file's sizes are from a shape's, in doublings; FAR for what only one of them has."""
    moe, own = file.moe_shape, shape.moe
    apart = 0.0 if moe is None and own is None else FAR
    if moe is not None and own is not None:
        names = ("experts", "topk", "hidden", "intermediate", "slices")
        apart = sum(doublings((getattr(moe, name), getattr(own, name))) for name in names)
    modules = file.module_shapes()
    for name in modules.keys() | shape.modules.keys():
        one, other = modules.get(name), shape.modules.get(name)
        if one is None or other is None:
            apart += FAR
        else:
            apart += doublings((one.k, other.k)) + doublings((sum(one.outs), sum(other.outs)))
    return apart


def doublings(sizes: tuple[int, int]) -> float:
    """Of two sizes, how many lie between them."""
    return abs(math.log2(sizes[0] / sizes[1]))
