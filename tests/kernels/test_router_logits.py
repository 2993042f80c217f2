"""Router logits with gaps between their rows reach vLLM's top-k operations without them."""

from typing import Any

import pytest
import torch
import vllm._custom_ops as ops
from vllm.model_executor.layers.fused_moe.router import fused_topk_bias_router, fused_topk_router

from lorahost_kernels.vllm_026 import patching, router_logits

TOKENS, EXPERTS, TOPK = 5, 4, 2


def top_k(logits: torch.Tensor) -> torch.Tensor:
    """As the compiled operation: it takes the memory for rows that follow each other."""
    rows = torch.as_strided(logits, (TOKENS, EXPERTS), (EXPERTS, 1), logits.storage_offset())
    return rows.softmax(1).topk(TOPK).indices


@pytest.fixture(params=router_logits.TOPK)
def operation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The patched operation, with the compiled one behind it replaced."""

    def compiled(topk_weights: Any, topk_ids: torch.Tensor, indices: Any, gating_output: torch.Tensor) -> None:
        topk_ids.copy_(top_k(gating_output))

    # what is patched already in this process stays recorded with vLLM's own function
    monkeypatch.setattr(patching, "_originals", {})
    for name in router_logits.TOPK:
        monkeypatch.setattr(ops, name, compiled)
    router_logits.apply_patches()
    return getattr(ops, request.param)


def padded_logits() -> torch.Tensor:
    """(tokens, experts) as a view of rows that are padded to 8 columns."""
    torch.manual_seed(0)
    return torch.randn(TOKENS, 8)[:, :EXPERTS]


@pytest.mark.parametrize("by_name", [False, True])
def test_every_token_gets_its_own_experts(operation: Any, by_name: bool) -> None:
    logits = padded_logits()
    want = logits.contiguous().softmax(1).topk(TOPK).indices
    assert not torch.equal(top_k(logits), want)
    ids = torch.empty(TOKENS, TOPK, dtype=torch.int64)
    if by_name:
        operation(None, ids, None, gating_output=logits)
    else:
        operation(None, ids, None, logits)
    assert torch.equal(ids, want)


def test_vllms_routers_call_the_patched_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(ops, "topk_softmax", lambda *given, **named: seen.append(given[3]))
    logits = torch.randn(TOKENS, EXPERTS)
    fused_topk_router.fused_topk(torch.randn(TOKENS, 8), logits, TOPK, renormalize=True)
    fused_topk_bias_router.vllm_topk_softmax(torch.empty(0), torch.empty(0), torch.empty(0), logits)
    assert [found is logits for found in seen] == [True, True]
