"""Names of the LoRA operations, and what runs or fails together; imports nothing."""

from __future__ import annotations

from typing import Literal

# this package's kernels, vLLM's own, or on the CPU this package's torch code
Path = Literal["triton", "stock", "torch"]

# Products that every platform has.
PRODUCTS = ("gate_up_shrink", "gate_up_expand", "down_shrink", "down_expand", "shrink", "expand")
# A family is replaced as a whole: shrink and expand hand a workspace to each other, experts share order and work list.
MOE = (*PRODUCTS[:4], "expand_swiglu", "expand_topk_sum", "expert_order", "work_list")
DENSE = PRODUCTS[4:]
OPERATIONS = (*MOE, *DENSE)
