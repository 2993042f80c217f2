"""Random weights of an engine that is measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lorahost.bench.vllm_026 import weights

EXPERTS, TOP_K, HIDDEN = 32, 4, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS)
        packed = torch.zeros(2, 2 * HIDDEN, HIDDEN // 2, dtype=torch.uint8)
        scale = torch.zeros(2, 2 * HIDDEN, HIDDEN // 32, dtype=torch.uint8)
        self.w13_weight = nn.Parameter(packed, requires_grad=False)
        self.w13_weight_scale = nn.Parameter(scale, requires_grad=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(1000, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(3))


@pytest.fixture
def model() -> Model:
    one = Model()
    with torch.no_grad():
        for parameter in one.parameters():
            if parameter.is_floating_point():
                parameter.fill_(1e-3)
    weights.fill(one)
    return one


def test_routing_spreads_over_the_experts(model: Model) -> None:
    x = model.embed_tokens(torch.randint(0, 1000, (16,), generator=torch.Generator().manual_seed(0)))
    touched = []
    for block in model.layers:
        chosen = block.router(block.norm(x)).topk(TOP_K).indices  # type: ignore[operator]
        touched.append(len(chosen.unique()))
    expected = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** 16)
    assert sum(touched) / len(touched) > 0.85 * expected


def test_layers_differ_and_the_same_name_gets_the_same_values(model: Model) -> None:
    first, second = model.layers[0].router.weight, model.layers[1].router.weight  # type: ignore[union-attr]
    assert not torch.equal(first, second)  # type: ignore[arg-type]
    again = Model()
    weights.fill(again)
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_packed_weights_are_random_codes_with_small_finite_scales(model: Model) -> None:
    block = model.layers[0]
    codes = block.w13_weight.flatten()  # type: ignore[union-attr]
    assert len(codes.unique()) == 256  # type: ignore[union-attr]
    exponents = block.w13_weight_scale.to(torch.int32) - 127  # type: ignore[union-attr, operator]
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    rms = (table**2).mean().sqrt() * (2.0 ** (2 * exponents.float())).mean().sqrt()
    # of the size of a freshly initialised layer
    assert 0.5 < float(rms) / (weights.GAIN / HIDDEN**0.5) < 2
    assert 255 not in block.w13_weight_scale  # type: ignore[operator]  # NaN in E8M0


def test_collapsed_weights_leave_the_floats_alone() -> None:
    one = Model()
    before = one.embed_tokens.weight.clone()
    weights.fill(one, spread=False)
    assert torch.equal(one.embed_tokens.weight, before)
    assert len(one.layers[0].w13_weight.unique()) == 256  # type: ignore[union-attr, operator]


def test_unknown_packed_bytes_are_refused() -> None:
    one = nn.Module()
    one.register_parameter("zeros", nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False))
    with pytest.raises(TypeError, match="zeros: no random values are known"):
        weights.fill(one)
