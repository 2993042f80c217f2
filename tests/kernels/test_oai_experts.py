"""Which launches the OAI Triton experts make between their two GEMMs; the launches themselves are tested elsewhere."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from lorahost_kernels import configs
from lorahost_kernels.ops import layer
from lorahost_kernels.vllm_026 import oai_experts

SWIGLU = MoEActivation.SWIGLUOAI
LIST, PAIRS = SimpleNamespace(work=object()), SimpleNamespace(work=None)


@pytest.mark.parametrize(
    ("lora", "slices", "activation", "fused_list", "want"),
    [
        (None, 1, SWIGLU, True, ["activation"]),
        (PAIRS, 1, SWIGLU, False, ["gate_up_swiglu"]),
        (LIST, 1, SWIGLU, True, ["gate_up_swiglu"]),
        (LIST, 1, SWIGLU, False, ["gate_up", "activation"]),
        (LIST, 2, SWIGLU, True, ["gate_up", "activation"]),
        (LIST, 1, MoEActivation.SILU, True, ["gate_up", "activation"]),
    ],
    ids=["no adapters", "pairs", "list", "list unfused", "two slices", "another activation"],
)
def test_launches_of_gate_up(
    lora: Any, slices: int, activation: Any, fused_list: bool, want: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(configs, "FUSED_LIST", fused_list)
    for name in ("gate_up", "gate_up_swiglu"):
        monkeypatch.setattr(layer, name, lambda *_, name=name: made.append(name))
    quant = SimpleNamespace(gemm1_alpha=None, gemm1_clamp_limit=None)
    experts = SimpleNamespace(quant_config=quant, activation=lambda *_: made.append("activation"))
    factors = (torch.empty(0),) * slices
    context = SimpleNamespace(w13_lora_a_stacked=factors, w13_lora_b_stacked=factors)
    tensors = [torch.empty(0)] * 3
    oai_experts.add_gate_up(experts, context, *tensors, lora, activation)
    assert made == want
