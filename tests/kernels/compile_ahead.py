"""Compiles some candidates in worker processes, then asks Triton for what launches of them would run.

Run as a program (the test process may have Triton's interpreter on), with a TRITON_CACHE_DIR of its own; prints JSON.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.driver import driver

from lorahost_kernels.ops.common import launch, replay
from lorahost_kernels.tune import compile as compiling
from lorahost_kernels.tune import measure, plan
from lorahost_kernels.tune.compile import Compiler, Pair
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tuned.shape import ModelShape, Module, MoeShape

SHAPE = ModelShape("small", MoeShape(4, 2, 256, 128, 2), {"o": Module(256, (256,))})
ONE_SLICE = ModelShape("small, interleaved", MoeShape(4, 2, 256, 128, 1))
PLACES = [Place("moe", 8, 2, 16), Place("moe", 1024, 2, 16), Place("dense", 1024, 1, 16),
          Place("moe_fused", 8, 2, 16), Place("moe_fused", 1024, 2, 16)]  # fmt: skip
launched = 0


def shape_of(place: Place) -> ModelShape:
    """The model of a point."""
    return ONE_SLICE if place.family == "moe_fused" else SHAPE


def cubins() -> int:
    """Compiled kernels in the cache."""
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin")))


def pretend(kernel: Any, key: Any, pointers: tuple[Tensor, ...], constants: Callable[[], Any]) -> None:
    """A launch up to the point where a GPU is needed."""
    global launched
    programs, args, options, _ = constants()
    kernel.warmup(*pointers, grid=(programs,), **args, **options)
    launched += 1


def candidates() -> list[tuple[Place, str, Pair]]:
    """The defaults of each product and a neighbour of each."""
    found = []
    for place in PLACES:
        for name, space in plan.spaces(shape_of(place), place, 227 * 1024, 800).items():
            way = plan.groupings(space.pairs, space.groups, place.rank)[0]
            base = space.default(way)
            found += [(place, name, pair) for pair in (base, next(space.neighbours(base), ("", base))[1])]
    return found


def main() -> None:
    """Prints problems of the workers, cubins that they made, launches, and cubins that the launches added."""
    work = candidates()
    compiler = Compiler(1, 90)
    found = dict(
        compiler.each([(compiling.problems(shape_of(place), place)[name], pair) for place, name, pair in work])
    )
    compiler.close()
    ahead = cubins()
    driver.set_active(compiling.CompileOnly(90))
    for module in (launch, compiling.swiglu_launch, compiling.topk_sum_launch):
        module.has_pdl = lambda device: True  # type: ignore[attr-defined]
    replay.launch = pretend
    calls = []
    for place in PLACES:
        sizes = (place.family, place.adapters, place.rank)
        bench = measure.Workbench(shape_of(place), *sizes, torch.device("cpu"), l2_bytes=1)
        batch = bench.batch(place.tokens)
        calls += [call for at, name, pair in work if at == place for call in batch.calls(name, pair)[:2]]
    lists, before = launched, cubins()
    for call in calls:
        call()
    more = cubins() - before
    problems = [text for text in found.values() if text]
    kernels = sorted({path.stem for path in Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin")})
    print(
        json.dumps(
            {"kernels": kernels, "problems": problems, "ahead": ahead, "launched": launched - lists, "more": more}
        )
    )


if __name__ == "__main__":
    main()
