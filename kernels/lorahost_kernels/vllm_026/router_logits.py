"""Router logits whose rows have gaps between them.

vLLM's top-k operations read the logits as if each row followed the one before. Inductor may pad a matrix product whose
columns are no multiple of 8 and hand on a view of the padded result, with gaps: all tokens but the first of a batch
then go to the wrong experts. Whether it pads is decided by a measurement when the model is compiled. Here the
operations get rows without gaps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import vllm._custom_ops as ops

from lorahost_kernels.vllm_026.patching import original, patch

TOPK = ("topk_softmax", "topk_sigmoid", "topk_hash_softplus_sqrt")
LOGITS = 3  # place of gating_output among their arguments


def apply_patches() -> None:
    """Patches every top-k operation that takes router logits."""
    for name in TOPK:
        patch(ops, name, packed(name))


def packed(name: str) -> Callable[..., Any]:
    """The operation on logits that are copied if they have gaps."""

    @functools.wraps(getattr(ops, name))
    def call(*given: Any, **named: Any) -> Any:
        if "gating_output" in named:
            named["gating_output"] = named["gating_output"].contiguous()
        else:
            given = (*given[:LOGITS], given[LOGITS].contiguous(), *given[LOGITS + 1 :])
        return original(ops, name)(*given, **named)

    return call
