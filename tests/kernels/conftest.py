"""Without a GPU the kernels run in Triton's interpreter, which is chosen while they are imported."""

import importlib
import os
from types import SimpleNamespace

import pytest
import torch
from tests.kernels.fake_cuda import STREAM, FakeGraph, FakeLibrary, driver_of

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # gluon: the interpreter imports it on first use, and that import asks for the variable again
    for name in (
        "triton.experimental.gluon",
        "lorahost_kernels.ops.layer",
        "lorahost_kernels.ops.work_list.launch",
        "lorahost_kernels.ops.expert_order.launch",
    ):
        importlib.import_module(name)
    del os.environ["TRITON_INTERPRET"]


@pytest.fixture
def poisoned_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial sums that nobody wrote are NaN, so that reading one shows."""
    from lorahost_kernels.ops.common import launch

    empty = launch.empty_hidden
    monkeypatch.setattr(launch, "empty_hidden", lambda *a: empty(*a).fill_(float("nan")))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """CUDA graphs without a GPU, as `graph_nodes` finds them."""
    from lorahost_kernels.vllm_026 import graph_nodes

    found = FakeLibrary()
    monkeypatch.setattr(FakeGraph, "library", found, raising=False)
    with pytest.MonkeyPatch.context() as loading:
        monkeypatch.setattr(graph_nodes, "state", graph_nodes.State(driver_of(found, loading)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found
