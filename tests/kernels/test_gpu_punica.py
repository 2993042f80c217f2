"""vLLM's LoRA wrapper on our kernels, with real metadata; without a GPU the kernels run in Triton's interpreter."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kernels.lora_cases import DEVICE, DTYPES, TOLERANCE, relative_error
from torch import Tensor
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.layers.utils import LoRAMapping
from vllm.lora.punica_wrapper import punica_gpu

from lorahost_kernels.ops import layer
from lorahost_kernels.vllm_026 import gpu_punica, module_flags

DTYPE = DTYPES[0]
SLOTS, RANK, HIDDEN = 3, 8, 48
# slot i holds adapter IDS[i]
IDS: list[int | None] = [11, None, 7]


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> gpu_punica.GpuPunicaWrapper:
    if DEVICE.type == "cpu":
        # vLLM imports it only where there is a GPU; the class itself needs torch alone
        from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

        monkeypatch.setattr(punica_gpu, "LoRAKernelMeta", LoRAKernelMeta, raising=False)
    monkeypatch.setattr(gpu_punica, "choose_paths", lambda device, dtype: SimpleNamespace(moe="triton", dense="triton"))
    config = SimpleNamespace(max_loras=SLOTS, specialize_active_lora=False, lora_dtype=DTYPE)
    return gpu_punica.GpuPunicaWrapper(256, 8, DEVICE, lora_config=config)


def use(wrapper: gpu_punica.GpuPunicaWrapper, ids: list[int]) -> None:
    """One step's mapping: an adapter id for each token, 0 for none."""
    wrapper.update_metadata(LoRAMapping(tuple(ids), tuple(ids[:1]), is_prefill=True), IDS, SLOTS + 1, 1000)


def factors(*widths: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    g = torch.Generator().manual_seed(1)
    a = tuple(torch.randn(SLOTS, 1, RANK, HIDDEN, generator=g).to(DEVICE, DTYPE) for _ in widths)
    return a, tuple(torch.randn(SLOTS, 1, n, RANK, generator=g).to(DEVICE, DTYPE) for n in widths)


def expected(y: Tensor, x: Tensor, a: Any, b: Any, slots: list[int]) -> Tensor:
    out = y.double().clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            parts = [b[i][slot, 0].double() @ (a[i][slot, 0].double() @ x[row].double()) for i in range(len(a))]
            out[row] += torch.cat(parts)
    return out


# few rows are served one by one, many from the step's work lists
@pytest.mark.parametrize("ids", [[7, 0, 11, 7], [0, 7] * 40 + [11] * 30 + [7] * 50, [11] * 200], ids=len)
def test_dense_layer(wrapper: gpu_punica.GpuPunicaWrapper, ids: list[int]) -> None:
    use(wrapper, ids)
    a, b = factors(32, 16, 16)
    padded = len(ids) + 5
    x = torch.randn(padded, HIDDEN).to(DEVICE, DTYPE)
    y = torch.randn(padded, 64).to(DEVICE, DTYPE)
    want = expected(y, x, a, b, [IDS.index(i) if i else -1 for i in ids])
    before = y.clone()
    wrapper.add_lora_linear(y, x, a, b, 1.0, (32, 16, 16))
    assert relative_error(y, want) < TOLERANCE[DTYPE]
    assert torch.equal(y[len(ids) :], before[len(ids) :])


def test_a_smaller_batch_leaves_nothing_of_the_last_one(wrapper: gpu_punica.GpuPunicaWrapper) -> None:
    a, b = factors(64)
    x, y = torch.randn(120, HIDDEN).to(DEVICE, DTYPE), torch.randn(120, 64).to(DEVICE, DTYPE)
    use(wrapper, [7] * 120)
    wrapper.add_lora_linear(y.clone(), x, a, b, 1.0, (64,))
    use(wrapper, [11] * 70)
    want = expected(y, x, a, b, [0] * 70)
    wrapper.add_lora_linear(y, x, a, b, 1.0, (64,))
    assert relative_error(y, want) < TOLERANCE[DTYPE]


def test_batch_without_adapters_launches_nothing(
    wrapper: gpu_punica.GpuPunicaWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "linear", lambda *a, **k: pytest.fail("launched"))
    use(wrapper, [0] * 9)
    assert wrapper.batch_without_adapters()
    a, b = factors(64)
    y = torch.zeros(9, 64, device=DEVICE, dtype=DTYPE)
    wrapper.add_lora_linear(y, torch.randn(9, HIDDEN).to(DEVICE, DTYPE), a, b, 1.0, (64,))
    assert not y.any()


def test_unknown_adapter_is_an_error(wrapper: gpu_punica.GpuPunicaWrapper) -> None:
    with pytest.raises(KeyError, match="adapter id 5 is in no slot"):
        use(wrapper, [7, 5])


class Manager:
    """What module_flags reads of vLLM's LoRAModelManager."""

    def __init__(self, modules: dict[str, Any], weights: dict[int, set[str]]) -> None:
        self.modules, self.weights, self.lora_slots, self.lora_index_to_id = modules, weights, SLOTS, list(IDS)

    def list_adapters(self) -> dict[int, int]:
        return {i: i for i in self.weights}

    def _get_lora_layer_weights(self, adapter: int, name: str) -> object | None:
        return object() if name in self.weights[adapter] else None


def dense_module(a: tuple[Tensor, ...]) -> Any:
    module = BaseLinearLayerWithLoRA.__new__(BaseLinearLayerWithLoRA)
    torch.nn.Module.__init__(module)
    module.lora_a_stacked = a
    return module


@pytest.mark.parametrize("rows", [4, 150])
def test_module_that_an_adapter_does_not_touch_is_skipped(wrapper: gpu_punica.GpuPunicaWrapper, rows: int) -> None:
    (a, b), other = factors(64), factors(64)
    manager = Manager({"router": dense_module(a), "qkv": dense_module(other[0])}, {11: {"qkv"}, 7: {"router", "qkv"}})
    # as in vLLM: a first adapter comes in inference mode, later ones outside
    with torch.inference_mode():
        module_flags.mark(manager, 11)
    module_flags.mark(manager, 7)
    # poison shows that the slot isn't read
    a[0][0] = float("nan")
    ids = [11, 7] * (rows // 2)
    use(wrapper, ids)
    x, y = torch.randn(rows, HIDDEN).to(DEVICE, DTYPE), torch.randn(rows, 64).to(DEVICE, DTYPE)
    want = expected(y, x, a, b, [-1 if i == 11 else 2 for i in ids])
    wrapper.add_lora_linear(y, x, a, b, 1.0, (64,))
    assert relative_error(y, want) < TOLERANCE[DTYPE]
