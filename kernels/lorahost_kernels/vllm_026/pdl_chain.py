"""Launches that show whether one of them starts too early, where a CUDA graph lacks the nodes between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CHECKS = 40  # replays
BLOCK = 256
SPIN = 4000  # steps of the slowest programs: tens of microseconds


@triton.jit
def late_copy(source, out, SPIN: tl.constexpr, BLOCK: tl.constexpr):
    """Lets the next launch start, and stores much later; one program a multiprocessor, so that all have started."""
    gdc_wait()
    gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + at)
    noise = value * 0
    for _ in range(SPIN * (1 + tl.program_id(0) % 4)):
        noise = noise * 1.0000001 + 1e-30 * value
    tl.store(out + at, value + noise * 0)


@triton.jit
def count_up(count):
    """Stands for a module's launch."""
    gdc_wait()
    gdc_launch_dependents()
    tl.store(count, tl.load(count) + 1)


@triton.jit
def waiting_add(x, out, BLOCK: tl.constexpr):
    """A reader that may start early, and waits."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gdc_wait()
    gdc_launch_dependents()
    tl.store(out + at, tl.load(x + at) + 1)


class Chain:
    """`late_copy`, two launches in the hands of `optional`, a reader; and again `late_copy` and a reader without them.

    Args:
        optional: Takes the function that makes the two launches.
        pdl: Whether the first reader is launched so that it may start early, or as most base kernels are; the second is
            launched the other way, so that one graph has edges of both kinds.
    """

    def __init__(self, optional: Callable[[Callable[[], object]], object], pdl: bool = False) -> None:
        self._optional, self._pdl = optional, pdl
        self.programs = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        self.source, self.middle, self.out, self.late, self.last = (
            torch.zeros(self.programs * BLOCK, device="cuda") for _ in range(5)
        )
        self.count = torch.zeros(1, device="cuda", dtype=torch.int32)
        self._turn, self._counted = 0, 0
        self.launch()
        torch.cuda.synchronize()
        self.count.zero_()

    def launch(self) -> None:
        """All launches of the chain."""
        late_copy[(self.programs,)](self.source, self.middle, SPIN, BLOCK, launch_pdl=True)
        self._optional(self._module)
        self._read(self.middle, self.out, self._pdl)
        late_copy[(self.programs,)](self.out, self.late, SPIN, BLOCK, launch_pdl=True)
        self._read(self.late, self.last, not self._pdl)
        # if memory comes from CUDA's own pools this is a node that can't be copied, as an engine's would be
        torch.empty(1, device="cuda")

    def _module(self) -> None:
        for _ in range(2):
            count_up[(1,)](self.count, launch_pdl=True)

    def _read(self, x: torch.Tensor, out: torch.Tensor, pdl: bool) -> None:
        if pdl:
            waiting_add[(self.programs,)](x, out, BLOCK, launch_pdl=True)
        else:
            torch.add(x, 1, out=out)

    def problem(self, replay: Callable[[], object], touched: bool) -> str:
        """What is wrong with a replay of the captured chain; "" if nothing is. touched: the two launches should run."""
        self._turn += 1
        self._counted += 2 * touched
        self.source.fill_(float(self._turn))
        torch.cuda.synchronize()
        replay()
        torch.cuda.synchronize()
        for number, (out, want) in enumerate(((self.out, self._turn + 1), (self.last, self._turn + 2)), 1):
            if (early := int((out != want).sum())) > 0:
                return f"{early} of {out.numel()} numbers were read before they were written, by reader {number}"
        if int(self.count.item()) != self._counted:
            return f"launches that may be left out ran {self.count.item()} times, not {self._counted}"
        return ""


def problem_of(chain: Chain, graph: Any, touch: Callable[[bool], object]) -> str:
    """What is wrong with replays of a graph of the chain, with its two launches and without; "" if nothing is.

    touch: says whether the two launches are to run; in the end they are.
    """
    with torch.cuda.graph(graph):
        chain.launch()
    for turn in range(CHECKS):
        touched = turn % 4 == 3
        touch(touched)
        if problem := chain.problem(graph.replay, touched):
            return problem
    # the next chain makes its first launches outside a graph
    touch(True)
    return ""
