"""The order in which the OAI Triton experts' GEMM takes its tiles at small batches.

Its grid has room for the tiles of any routing, and eight rows of tiles take turns in the numbering of its programs.
Where few experts have tokens, programs with work alternate with idle ones, and the GPU puts two busy ones on one
multiprocessor while others have none. The GEMM has an option to number the busy ones first, which is off in vLLM. The
outputs are equal, bit for bit; for times see `bench.expert_tiles`.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from lorahost_kernels.vllm_026.patching import original, patch

MODULE, NAME = "triton_kernels.matmul_ogs", "make_opt_flags"
# above 1 the busy programs come first; a higher one interleaves them, for which no gain was measured
XCD_SWIZZLE = 2
# tile height of batches with up to 16 pairs an expert; with higher tiles few programs of a grid are idle
BLOCK_M = 16
ROUTING_DATA = 7  # its place among the arguments


def apply_patches() -> str:
    """Patches the choice of launch options for every call of this process; "" or why that can't be."""
    try:
        matmul = importlib.import_module(MODULE)
        options = importlib.import_module(f"{MODULE}_details.opt_flags").OptFlags
        fields = {f.name for f in dataclasses.fields(options)}
    except (ImportError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    needed = {"block_m", "is_persistent", "xcd_swizzle"}
    if not hasattr(matmul, NAME) or not needed <= fields:
        return f"this triton_kernels has no {NAME} with {', '.join(sorted(needed))}"
    patch(matmul, NAME, make_opt_flags)
    return ""


def make_opt_flags(*args: Any) -> Any:
    """The choice of triton_kernels, with the busy programs first where the grid has many idle ones."""
    flags = original(importlib.import_module(MODULE), NAME)(*args)
    routing = args[ROUTING_DATA]
    if flags.is_persistent or flags.block_m > BLOCK_M or routing is None or routing.expt_data is None:
        return flags
    return dataclasses.replace(flags, xcd_swizzle=XCD_SWIZZLE)
