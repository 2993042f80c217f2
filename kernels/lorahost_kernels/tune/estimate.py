"""What tuned points are worth in an engine's step, by bytes and by the times measured."""

from __future__ import annotations

from collections.abc import Sequence

from lorahost_kernels.tune.writer import Result
from lorahost_kernels.tuned.shape import ModelShape


def base_bytes(shape: ModelShape, tokens: int) -> float:
    """Bytes of base weights that a step of so many tokens reads: a floor, without the KV cache."""
    dense = 2 * sum(m.k * sum(m.outs) for m in shape.modules.values())
    experts = 0.0
    if shape.moe:
        moe = shape.moe
        touched = moe.experts * (1 - (1 - moe.topk / moe.experts) ** tokens)
        experts = touched * 3 * moe.hidden * moe.intermediate * shape.weight_bytes
    hidden = shape.moe.hidden if shape.moe else max((m.k for m in shape.modules.values()), default=0)
    return shape.layers * (dense + experts) + 2 * shape.vocab * hidden


def table(shape: ModelShape, results: Sequence[Result], rate: float) -> str:
    """Lines of LoRA time per step before and after, and of the step's floor with it; rate: bytes per second."""
    lines = ["tokens   LoRA ms a step        base weights ms   step floor gains at most"]
    for tokens in sorted({r.tokens for r in results}):
        here = [r for r in results if r.tokens == tokens]
        # an engine's experts are of one family
        if any(r.family == "moe_fused" for r in here):
            here = [r for r in here if r.family != "moe"]
        before, after = (shape.layers * sum(getattr(r, n) for r in here) / 1e3 for n in ("before_us", "after_us"))
        base = base_bytes(shape, tokens) / rate * 1e3
        gain = (base + before) / (base + after) - 1
        part = "" if len(here) == bool(shape.moe) + bool(shape.modules) else "  (one family only)"
        lines.append(f"{tokens:6}   {before:7.3f} -> {after:7.3f}    {base:15.3f}   {gain:8.1%}{part}")
    return "\n".join(lines)
