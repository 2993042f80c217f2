"""Shapes of real models, random layers of LoRA weights, and random batches."""

from dataclasses import dataclass

import torch

from lorahost_kernels.tune import cases
from lorahost_kernels.tune.cases import Layer, random_slots, random_topk, random_weights
from lorahost_kernels.tuned import shape as shapes

__all__ = [
    "DENSE", "MOE", "DenseShape", "Layer", "MoeShape", "dense_layer", "moe_layer", "random_slots", "random_topk",
    "random_weights",
]  # fmt: skip


@dataclass(frozen=True)
class MoeShape(shapes.MoeShape):
    """One MoE layer with the rank of its adapters."""

    rank: int = 32


@dataclass(frozen=True)
class DenseShape:
    """The LoRA-wrapped linear layers of one dense block: name -> (in, out of each slice)."""

    modules: dict[str, tuple[int, tuple[int, ...]]]
    rank: int = 32


def moe_of(name: str) -> MoeShape:
    """The experts of a known model."""
    moe = shapes.KNOWN[name].moe
    assert moe is not None
    return MoeShape(moe.experts, moe.topk, moe.hidden, moe.intermediate, moe.slices)


MOE = {
    **{name: moe_of(name) for name in ("gpt-oss-20b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite")},
    "article-figure-1": MoeShape(8, 2, 4096, 11008, 2),
}
DENSE = {
    name: DenseShape({n: (m.k, m.outs) for n, m in shapes.KNOWN[name].modules.items()})
    for name in ("gpt-oss-20b", "llama-3.3-70b", "qwen3-32b")
}


def moe_layer(
    shape: MoeShape, tokens: int, slots: int, adapters: int, device: torch.device, dtype: torch.dtype
) -> tuple[Layer, Layer]:
    """(gate_up, down) of one layer; `adapters` of the `slots` resident adapters are in the batch."""
    return cases.moe_layer(shape, shape.rank, tokens, slots, adapters, device, dtype)


def dense_layer(
    k: int,
    widths: tuple[int, ...],
    rank: int,
    tokens: int,
    slots: int,
    adapters: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Layer:
    """One LoRA-wrapped linear of in-size k and one output slice for each width."""
    return cases.dense_layer(shapes.Module(k, widths), rank, tokens, slots, adapters, device, dtype)
