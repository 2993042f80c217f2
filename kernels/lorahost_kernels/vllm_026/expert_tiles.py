"""The order in which the OAI Triton experts' second GEMM takes its tiles at small batches.

Its grid has room for the tiles of any routing, and eight rows of tiles take turns in the numbering of its programs.
Where few experts have tokens, programs with work alternate with idle ones, and how many busy ones the GPU puts on one
multiprocessor depends on what was launched before. The GEMM has an option to number the busy ones first, which is off
in vLLM. The outputs are equal, bit for bit; for times see `bench.expert_tiles` and docs/kernels.md.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any, Protocol

from lorahost_kernels.configs import cdiv
from lorahost_kernels.ops.expert_order.launch import count_tiles
from lorahost_kernels.vllm_026.patching import original, patch

MODULE, NAME = "triton_kernels.matmul_ogs", "make_opt_flags"
# above 1 the busy programs come first; a higher one interleaves them, which gained nothing
XCD_SWIZZLE = 2
# tile height of batches with up to 16 pairs an expert: with higher ones, as with fewer pairs than experts, few are idle
BLOCK_M = 16
# places among the arguments; later versions of triton_kernels have a batch size before the rows
ROWS, ROUTING_DATA = 4, 7
PLACED = ["m", "n", "k", "routing_data"]


class Options(Protocol):
    """What is read of triton_kernels' OptFlags."""

    block_m: int
    fused_scatter: bool
    is_persistent: bool


def apply_patches() -> str:
    """Patches the choice of launch options for every call of this process; "" or why that can't be."""
    try:
        matmul = importlib.import_module(MODULE)
        options = importlib.import_module(f"{MODULE}_details.opt_flags").OptFlags
        fields = {f.name for f in dataclasses.fields(options)}
    except (ImportError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    needed = {"block_m", "fused_scatter", "is_persistent", "xcd_swizzle"}
    if not hasattr(matmul, NAME) or not needed <= fields:
        return f"this triton_kernels has no {NAME} with {', '.join(sorted(needed))}"
    choose = getattr(matmul, NAME)
    if choose is make_opt_flags:
        return ""
    if list(inspect.signature(choose).parameters)[ROWS : ROUTING_DATA + 1] != PLACED:
        return f"this triton_kernels has a {NAME} with other arguments: {inspect.signature(choose)}"
    patch(matmul, NAME, make_opt_flags)
    return ""


def make_opt_flags(*args: Any) -> Any:
    """The choice of triton_kernels, with the busy programs first where that gains."""
    flags = original(importlib.import_module(MODULE), NAME)(*args)
    routing = args[ROUTING_DATA]
    if flags.is_persistent or routing is None or routing.expt_data is None:
        return flags
    gains = second_gemm(flags) and has_idle_programs(args[ROWS], routing.n_expts_tot, flags.block_m)
    return dataclasses.replace(flags, xcd_swizzle=XCD_SWIZZLE) if gains else flags


def has_idle_programs(pairs: int, experts: int, block_m: int) -> bool:
    """Whether many programs of a grid may be idle.

    Rows of pairs without an expert are cleared by the first busy and by the first idle programs; half of the grid is
    enough for all rows, so that one of the two clears them.
    """
    enough = 2 * cdiv(pairs, block_m) <= count_tiles(pairs, experts, block_m)
    return enough and block_m <= BLOCK_M and pairs >= experts


def second_gemm(flags: Options) -> bool:
    """Whether each row goes to where its pair is. The first GEMM is slower with busy programs first, see kernels.md."""
    return flags.fused_scatter
