"""Under tensor parallelism each rank gets its own columns of an adapter, also where the backend pads them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.layers.fused_moe import FusedMoE3DWithLoRA, FusedMoEWithLoRA

from lorahost_kernels.vllm_026 import patching, tp_slices

EXPERTS, RANK, TRUE, PADDED = 2, 4, 6, 8


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls, name in tp_slices.CUTS:
        monkeypatch.setattr(cls, name, getattr(cls, name))
    tp_slices.apply_patches()


def layer_of(cls: type, rank: int, base_model: str = "GptOssForCausalLM") -> Any:
    layer: Any = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    layer.tp_size, layer.tp_rank, layer._base_model = 2, rank, base_model
    layer.moe_config = SimpleNamespace(
        intermediate_size_per_partition=PADDED, intermediate_size_per_partition_unpadded=TRUE
    )
    return layer


@pytest.mark.parametrize("rank", [0, 1])
def test_down_a(rank: int) -> None:
    whole = torch.arange(EXPERTS * RANK * 2 * TRUE).view(EXPERTS, RANK, 2 * TRUE)
    layer = layer_of(FusedMoE3DWithLoRA, rank)
    assert torch.equal(layer._slice_w2_a(whole), whole[:, :, rank * TRUE : (rank + 1) * TRUE])
    assert layer.moe_config.intermediate_size_per_partition == PADDED


@pytest.mark.parametrize("rank", [0, 1])
def test_interleaved_gate_up_b(rank: int) -> None:
    whole = torch.arange(EXPERTS * 4 * TRUE * RANK).view(EXPERTS, 4 * TRUE, RANK)
    share = layer_of(FusedMoE3DWithLoRA, rank)._slice_w13_b(whole)
    assert torch.equal(share, whole[:, 2 * rank * TRUE : 2 * (rank + 1) * TRUE])


@pytest.mark.parametrize("rank", [0, 1])
def test_gate_or_up_b_of_separate_slices(rank: int) -> None:
    whole = torch.arange(EXPERTS * 2 * TRUE * RANK).view(EXPERTS, 2 * TRUE, RANK)
    share = layer_of(FusedMoEWithLoRA, rank)._slice_w13_b(whole)
    assert torch.equal(share, whole[:, rank * TRUE : (rank + 1) * TRUE])


def test_vllm_itself_cuts_by_the_padded_size() -> None:
    whole = torch.arange(EXPERTS * RANK * 2 * TRUE).view(EXPERTS, RANK, 2 * TRUE)
    share = patching.original(FusedMoEWithLoRA, "_slice_w2_a")(layer_of(FusedMoEWithLoRA, 1), whole)
    assert torch.equal(share, whole[:, :, PADDED : 2 * PADDED])
