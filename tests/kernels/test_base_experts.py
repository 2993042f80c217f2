"""Which code vLLM's selection gives a base model's MXFP4 experts on a GPU, with the plugin's order of preference."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.model_executor.layers.fused_moe.oracle.mxfp4 as mxfp4
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

from lorahost_kernels.vllm_026 import (
    gpu_punica,
    install,
    module_flags,
    oai_experts,
    patching,
    prefill_graphs,
    router_logits,
    tp_slices,
    warm,
)

Backend = mxfp4.Mxfp4MoeBackend
# what an H200 has of vLLM's order
H200 = (Backend.TRITON, Backend.TRITON_UNFUSED, Backend.MARLIN)
SWIGLU, SILU = MoEActivation.SWIGLUOAI, MoEActivation.SILU


@pytest.fixture(autouse=True)
def an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that every class of H200's backends takes and no other; all else that vLLM asks of a class is real."""
    for backend in Backend.__members__.values():
        if backend is Backend.NONE:
            continue
        for kind in mxfp4.backend_to_kernel_cls(backend):
            monkeypatch.setattr(kind, "_supports_current_device", staticmethod(lambda there=backend in H200: there))
    # vLLM's own of these two, whatever this process has patched before; all else stays as it is
    known = dict(patching._originals)
    for owner, name in ((oai_experts.Experts, "apply"), (mxfp4, "_get_priority_backends_for_gpt_oss")):
        monkeypatch.setattr(owner, name, known.pop(patching.qualified_name(owner, name), getattr(owner, name)))
    monkeypatch.setattr(patching, "_originals", known)


def select(lora: bool, asked: str = "auto", activation: MoEActivation = SWIGLU) -> Any:
    """The backend that vLLM takes for GPT-OSS's experts; `asked` is --moe-backend."""
    config = FusedMoEConfig(
        num_experts=32, experts_per_token=4, hidden_dim=2880, intermediate_size=2880, num_local_experts=32,
        num_logical_experts=32, activation=activation, device="cpu", routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(), in_dtype=torch.bfloat16,
        moe_backend=asked, is_lora_enabled=lora,
    )  # fmt: skip
    engine = VllmConfig()
    # all that is read of it
    engine.model_config = SimpleNamespace(quantization_config=None)
    engine.lora_config = SimpleNamespace() if lora else None
    with set_current_vllm_config(engine):
        backend, kind = mxfp4.select_mxfp4_moe_backend(config)
    assert kind in mxfp4.backend_to_kernel_cls(backend)
    return backend


def test_experts_that_keep_their_rows_ordered_come_before_marlin() -> None:
    assert select(lora=True) is Backend.MARLIN
    oai_experts.apply_patches()
    assert select(lora=True) is Backend.TRITON_UNFUSED


def test_a_gpu_without_them_gets_vllms_next(monkeypatch: pytest.MonkeyPatch) -> None:
    oai_experts.apply_patches()
    monkeypatch.setattr(oai_experts.Experts, "_supports_current_device", staticmethod(lambda: False))
    assert select(lora=True) is Backend.MARLIN


@pytest.mark.parametrize(("asked", "want"), [("marlin", Backend.MARLIN), ("triton_unfused", Backend.TRITON_UNFUSED)])
def test_what_the_user_asks_for_is_kept(asked: str, want: Any) -> None:
    assert select(lora=True, asked=asked) is want
    oai_experts.apply_patches()
    assert select(lora=True, asked=asked) is want


@pytest.mark.parametrize("activation", [SWIGLU, SILU], ids=["swiglu", "silu"])
def test_without_lora_vllms_choice_stays(activation: MoEActivation) -> None:
    stock = select(lora=False, activation=activation)
    assert stock is (Backend.TRITON if activation is SWIGLU else Backend.MARLIN)
    oai_experts.apply_patches()
    assert select(lora=False, activation=activation) is stock


@pytest.mark.parametrize(("kernels", "want"), [(True, Backend.TRITON_UNFUSED), (False, Backend.MARLIN)])
def test_vllms_choice_stays_without_our_kernels(monkeypatch: pytest.MonkeyPatch, kernels: bool, want: Any) -> None:
    """As the plugin registers itself by LORAHOST_KERNELS; patches of other parts of vLLM are left out."""
    for module in (module_flags, prefill_graphs, router_logits, tp_slices, warm):
        monkeypatch.setattr(module, "apply_patches", lambda: None)
    monkeypatch.setattr(gpu_punica, "patch", lambda *_: None)
    monkeypatch.setattr(gpu_punica, "has_triton_kernels", lambda: True)
    monkeypatch.setattr(install, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    for name in ("operations", "kernels"):
        monkeypatch.setattr(install, name, {})
    install.register_gpu(kernels)
    assert select(lora=True) is want


def test_only_the_preferred_experts_move() -> None:
    stock = mxfp4._get_priority_backends_for_gpt_oss()
    oai_experts.apply_patches()
    engine = VllmConfig()
    engine.lora_config = SimpleNamespace()
    with set_current_vllm_config(engine):
        ours = mxfp4._get_priority_backends_for_gpt_oss()
    assert [b for b in ours if b is not Backend.TRITON_UNFUSED] == stock
    assert ours[ours.index(Backend.TRITON) + 1] is Backend.TRITON_UNFUSED
