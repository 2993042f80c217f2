"""Random LoRA weights and batches for a model's shapes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lorahost_kernels.ops.common.routing import Routing
from lorahost_kernels.tuned.shape import Module, MoeShape

Mix = Literal["even", "uniform", "zipf"]
PREFILL = 1024  # tokens from which a batch is taken for a prefill: one run of tokens for each adapter
EXPERT_SKEW = 0.5  # exponent of the experts' popularity in the Zipf mix; adapters have 1
Weights = tuple[list[Tensor], list[Tensor]]


@dataclass
class Layer:
    """LoRA weights of one layer and the activations that its product reads and writes."""

    x: Tensor
    y: Tensor
    lora_a: list[Tensor]
    lora_b: list[Tensor]
    routing: Routing
    out: Tensor | None = None  # of an expand that takes over the step behind it, else y is the output

    @property
    def operands(self) -> tuple[Any, ...]:
        """The arguments of its product but for the tiles."""
        return (*([] if self.out is None else [self.out]), self.y, self.x, self.lora_a, self.lora_b, self.routing)

    @property
    def result(self) -> Tensor:
        """What its product writes."""
        return self.y if self.out is None else self.out


def random_weights(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Normal, scaled by the last dimension, so that products keep the size of their inputs."""
    return torch.randn(shape, device=device, dtype=dtype).mul_(shape[-1] ** -0.5)


def popularity(n: int, exponent: float, device: torch.device) -> Tensor:
    """float32 (n,): weights 1 / rank^exponent in random order."""
    return torch.arange(1, n + 1, device=device).pow(-exponent)[torch.randperm(n, device=device)]


def random_slots(tokens: int, slots: int, prefill: bool, device: torch.device, mix: Mix = "even") -> Tensor:
    """int32 (tokens,): the adapter of each token; in a prefill equal adapters follow each other.

    even: every adapter in turn; uniform and zipf: drawn.
    """
    index = torch.arange(tokens, device=device)
    if mix == "even":
        return (index * slots // max(tokens, 1) if prefill else index % slots).to(torch.int32)
    likely = popularity(slots, 1.0 if mix == "zipf" else 0.0, device)
    drawn = torch.multinomial(likely, tokens, replacement=True)
    return (drawn.sort().values if prefill else drawn).to(torch.int32)


def random_topk(tokens: int, experts: int, topk: int, device: torch.device, mix: Mix = "even") -> tuple[Tensor, Tensor]:
    """(ids int32, weights float32) of distinct random experts per token, zipf: some more popular than others."""
    scores = torch.rand(tokens, experts, device=device)
    if mix == "zipf":
        # the largest of log(u) / w draw without replacement in proportion to w
        scores = scores.clamp_(1e-6, 1 - 1e-6).log_().div_(popularity(experts, EXPERT_SKEW, device))
    ids = scores.topk(topk, dim=1).indices
    weights = torch.softmax(torch.rand(tokens, topk, device=device), dim=1)
    return ids.to(torch.int32), weights


def moe_weights(
    shape: MoeShape, rank: int, slots: int, device: torch.device, dtype: torch.dtype
) -> tuple[Weights, Weights]:
    """(A, B) of gate_up and of down, for every slot and expert."""
    made: dict[str, Any] = {"device": device, "dtype": dtype}
    e, h, i, width = shape.experts, shape.hidden, shape.intermediate, shape.gate_up_width
    gate_up = (
        [random_weights(slots, e, rank, h, **made) for _ in range(shape.slices)],
        [random_weights(slots, e, width, rank, **made) for _ in range(shape.slices)],
    )
    return gate_up, ([random_weights(slots, e, rank, i, **made)], [random_weights(slots, e, h, rank, **made)])


def dense_weights(module: Module, rank: int, slots: int, device: torch.device, dtype: torch.dtype) -> Weights:
    """(A, B) of one linear layer, for every slot."""
    made: dict[str, Any] = {"device": device, "dtype": dtype}
    return (
        [random_weights(slots, 1, rank, module.k, **made) for _ in module.outs],
        [random_weights(slots, 1, n, rank, **made) for n in module.outs],
    )


def routing_of(
    shape: MoeShape | None, tokens: int, slots: int, adapters: int, device: torch.device, mix: Mix = "even"
) -> Routing:
    """A batch's rows for experts (None: for a dense layer); `adapters` of the `slots` are in it."""
    token_slots = random_slots(tokens, adapters, tokens >= PREFILL, device, mix)
    enabled = torch.ones(slots + 1, dtype=torch.int32, device=device)
    if shape is None:
        return Routing(token_slots, enabled)
    ids, weights = random_topk(tokens, shape.experts, shape.topk, device, mix)
    return Routing(token_slots, enabled, shape.experts, ids, weights)


def odd_routing(shape: MoeShape | None, tokens: int, slots: int, device: torch.device) -> Routing:
    """A check's rows: half of them one adapter's on few experts, the others mixed with rows without work."""
    routing = routing_of(shape, tokens, slots, slots, device, "uniform")
    half = tokens // 2
    routing.token_slots[:half] = 0
    routing.token_slots[half::7] = -1
    routing.token_slots[half + 1 :: 9] = slots + 3
    if slots > 2:
        routing.adapter_enabled[slots - 1] = 0
    if routing.topk_ids is not None and shape:
        assert shape.experts >= shape.topk
        routing.topk_ids[:half] = torch.arange(shape.topk, dtype=torch.int32, device=device)
        routing.topk_ids[half + 2, 0] = -1
    return routing


def moe_activations(
    shape: MoeShape, tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(x, y) of gate_up and of down."""
    made: dict[str, Any] = {"device": device, "dtype": dtype}
    h, i = shape.hidden, shape.intermediate
    gate_up = torch.randn(tokens, h, **made), torch.randn(tokens, shape.topk, 2 * i, **made)
    return gate_up, (torch.randn(tokens * shape.topk, i, **made), torch.randn(tokens, shape.topk, h, **made))


def fused_activations(
    shape: MoeShape, tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """(x, y, out) of gate_up and of down whose expands take over the step behind them."""
    made: dict[str, Any] = {"device": device, "dtype": dtype}
    (x, y), down = moe_activations(shape, tokens, device, dtype)
    outs = torch.zeros(tokens * shape.topk, shape.intermediate, **made), torch.zeros(tokens, shape.hidden, **made)
    return (x, y.flatten(0, 1), outs[0]), (*down, outs[1])


def dense_activations(module: Module, tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x, y) of one linear layer."""
    made: dict[str, Any] = {"device": device, "dtype": dtype}
    return torch.randn(tokens, module.k, **made), torch.randn(tokens, sum(module.outs), **made)


def moe_layer(
    shape: MoeShape, rank: int, tokens: int, slots: int, adapters: int, device: torch.device, dtype: torch.dtype
) -> tuple[Layer, Layer]:
    """(gate_up, down) of one layer; `adapters` of the `slots` resident adapters are in the batch."""
    routing = routing_of(shape, tokens, slots, adapters, device)
    gate_up, down = moe_weights(shape, rank, slots, device, dtype)
    first, second = moe_activations(shape, tokens, device, dtype)
    return Layer(*first, *gate_up, routing), Layer(*second, *down, routing)


def dense_layer(
    module: Module, rank: int, tokens: int, slots: int, adapters: int, device: torch.device, dtype: torch.dtype
) -> Layer:
    """One LoRA-wrapped linear layer."""
    x, y = dense_activations(module, tokens, device, dtype)
    weights = dense_weights(module, rank, slots, device, dtype)
    return Layer(x, y, *weights, routing_of(None, tokens, slots, adapters, device))


def mixes(calls: int) -> Sequence[Mix]:
    """The mix of each of `calls` batches: half uniform, half Zipf."""
    return ["uniform" if i % 2 == 0 else "zipf" for i in range(calls)]
