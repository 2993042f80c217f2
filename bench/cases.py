"""Shapes of real models, random layers of LoRA weights, and random batches."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lorahost_kernels.ops.common.routing import Routing


@dataclass(frozen=True)
class MoeShape:
    """One MoE layer; slices: 1 where gate and up are one interleaved tensor, else 2; rank of the adapters."""

    experts: int
    topk: int
    hidden: int
    intermediate: int
    slices: int
    rank: int = 32


@dataclass(frozen=True)
class DenseShape:
    """The LoRA-wrapped linear layers of one dense block: name -> (in, out of each slice)."""

    modules: dict[str, tuple[int, tuple[int, ...]]]
    rank: int = 32


MOE = {
    "gpt-oss-20b": MoeShape(32, 4, 2880, 2880, 1),
    "qwen3-30b-a3b": MoeShape(128, 8, 2048, 768, 2),
    "mixtral-8x7b": MoeShape(8, 2, 4096, 14336, 2),
    "deepseek-v2-lite": MoeShape(64, 6, 2048, 1408, 2),
    "article-figure-1": MoeShape(8, 2, 4096, 11008, 2),
}
DENSE = {
    "gpt-oss-20b": DenseShape({"qkv": (2880, (4096, 512, 512)), "o": (4096, (2880,))}),
    "llama-3.3-70b": DenseShape(
        {
            "qkv": (8192, (8192, 1024, 1024)),
            "o": (8192, (8192,)),
            "gate_up": (8192, (28672, 28672)),
            "down": (28672, (8192,)),
        }
    ),
    "qwen3-32b": DenseShape(
        {
            "qkv": (5120, (8192, 1024, 1024)),
            "o": (8192, (5120,)),
            "gate_up": (5120, (25600, 25600)),
            "down": (25600, (5120,)),
        }
    ),
}


@dataclass
class Layer:
    """LoRA weights of one layer and the activations that its product reads and writes."""

    x: Tensor
    y: Tensor
    lora_a: list[Tensor]
    lora_b: list[Tensor]
    routing: Routing


def random_weights(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Normal, scaled by the last dimension, so that products keep the size of their inputs."""
    return torch.randn(shape, device=device, dtype=dtype).mul_(shape[-1] ** -0.5)


def random_slots(tokens: int, slots: int, prefill: bool, device: torch.device) -> Tensor:
    """int32 (tokens,): one adapter a token in turn (decode), or one run of tokens for each adapter (prefill)."""
    index = torch.arange(tokens, device=device)
    return (index * slots // tokens if prefill else index % slots).to(torch.int32)


def random_topk(tokens: int, experts: int, topk: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids int32, weights float32) of distinct random experts per token."""
    scores = torch.rand(tokens, experts, device=device)
    weights, ids = scores.topk(topk, dim=1)
    return ids.to(torch.int32), torch.softmax(weights, dim=1)


def moe_layer(
    shape: MoeShape, tokens: int, slots: int, adapters: int, device: torch.device, dtype: torch.dtype
) -> tuple[Layer, Layer]:
    """(gate_up, down) of one layer; `adapters` of the `slots` resident adapters are in the batch."""
    ids, weights = random_topk(tokens, shape.experts, shape.topk, device)
    routing = Routing(
        random_slots(tokens, adapters, tokens >= 1024, device),
        torch.ones(slots + 1, dtype=torch.int32, device=device),
        shape.experts,
        ids,
        weights,
    )
    made: dict[str, Any] = {"device": device, "dtype": dtype}
    e, h, i, r = shape.experts, shape.hidden, shape.intermediate, shape.rank
    width = 2 * i // shape.slices
    gate_up = Layer(
        random_weights(tokens, h, **made) * h**0.5,
        torch.randn(tokens, shape.topk, 2 * i, **made),
        [random_weights(slots, e, r, h, **made) for _ in range(shape.slices)],
        [random_weights(slots, e, width, r, **made) for _ in range(shape.slices)],
        routing,
    )
    down = Layer(
        random_weights(tokens * shape.topk, i, **made) * i**0.5,
        torch.randn(tokens, shape.topk, h, **made),
        [random_weights(slots, e, r, i, **made)],
        [random_weights(slots, e, h, r, **made)],
        routing,
    )
    return gate_up, down


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
    made: dict[str, Any] = {"device": device, "dtype": dtype}
    return Layer(
        torch.randn(tokens, k, **made),
        torch.randn(tokens, sum(widths), **made),
        [random_weights(slots, 1, rank, k, **made) for _ in widths],
        [random_weights(slots, 1, n, rank, **made) for n in widths],
        Routing(
            random_slots(tokens, adapters, tokens >= 1024, device),
            torch.ones(slots + 1, dtype=torch.int32, device=device),
        ),
    )
