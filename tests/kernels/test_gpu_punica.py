"""vLLM's LoRA wrapper on our kernels, with real metadata; without a GPU the kernels run in Triton's interpreter."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kernels.lora_cases import DEVICE, DTYPES, TOLERANCE, relative_error
from tests.kernels.lora_manager import Manager, dense_module
from torch import Tensor
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


def moe_step(wrapper: gpu_punica.GpuPunicaWrapper, tokens: int) -> tuple[Any, Tensor, Tensor]:
    """One MoE layer's gate_up and down, as vLLM's experts call them: what add_lora_w13 gave, and both outputs.

    All slots but those of adapters 11 and 7 hold NaN; outputs start as ones.
    """
    experts, topk, width = 3, 2, 16
    g = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(*shape, generator=g).to(DEVICE, DTYPE)  # noqa: E731
    a13, b13 = (tuple(draw(SLOTS, experts, *two) for _ in range(2)) for two in ((RANK, HIDDEN), (width, RANK)))
    a2, b2 = (draw(SLOTS, experts, RANK, width),), (draw(SLOTS, experts, HIDDEN, RANK),)
    for weights in (*a13, *b13, *a2, *b2):
        weights[IDS.index(None)] = float("nan")
    ids = torch.randint(0, experts, (tokens, topk), generator=g, dtype=torch.int32).to(DEVICE)
    y13, y2 = (torch.ones(tokens, topk, n, device=DEVICE, dtype=DTYPE) for n in (2 * width, HIDDEN))
    common: dict[str, Any] = {
        "topk_weights": torch.rand(tokens, topk, generator=g).to(DEVICE), "w1": None, "w2": None,
        "num_tokens": tokens, "top_k_num": topk, "max_loras": SLOTS, "top_k": topk, "fully_sharded": False,
        "adapter_enabled": torch.ones(SLOTS + 1, dtype=torch.int32, device=DEVICE), "use_tuned_config": False,
    }  # fmt: skip
    grouping = wrapper.add_lora_w13(
        y13, draw(tokens, HIDDEN), a13, b13, topk_ids=ids, expert_map=None, local_num_experts=experts, num_slices=2,
        **common,
    )  # fmt: skip
    keys = ("sorted_token_ids_lora", "expert_ids_lora", "num_tokens_post_padded_lora", "token_lora_mapping")
    groups = dict(zip(keys, grouping, strict=True))
    wrapper.add_lora_w2(y2, draw(tokens * topk, width), a2, b2, tp_rank=0, **groups, **common)
    return grouping, y13, y2


# few rows are served one by one, many from a work list
@pytest.mark.parametrize("tokens", [9, 200])
def test_experts_without_adapters_launch_nothing(
    wrapper: gpu_punica.GpuPunicaWrapper, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    # the step before had adapters
    use(wrapper, [7, 11] * (tokens // 2))
    for owner, name in (
        *((layer, product) for product in ("gate_up", "down")),
        *((gpu_punica, grouping) for grouping in ("with_work_list", "build_work_list")),
        *((punica_gpu.PunicaWrapperGPU, stock) for stock in ("add_lora_w13", "add_lora_w2")),
    ):
        monkeypatch.setattr(owner, name, lambda *_, name=name, **__: pytest.fail(f"{name} was called"))
    use(wrapper, [0] * tokens)
    assert wrapper.batch_without_adapters()
    grouping, y13, y2 = moe_step(wrapper, tokens)
    assert grouping == (None, None, None, None)
    assert (y13 == 1).all()
    assert (y2 == 1).all()


def test_experts_with_an_adapter_in_one_row_change_that_row_alone(wrapper: gpu_punica.GpuPunicaWrapper) -> None:
    use(wrapper, [0, 0, 7, 0])
    assert not wrapper.batch_without_adapters()
    _, *outputs = moe_step(wrapper, 4)
    for y in outputs:
        assert [bool((row != 1).any()) for row in y] == [False, False, True, False]
        assert y.isfinite().all()


def test_unknown_adapter_is_an_error(wrapper: gpu_punica.GpuPunicaWrapper) -> None:
    with pytest.raises(KeyError, match="adapter id 5 is in no slot"):
        use(wrapper, [7, 5])


@pytest.mark.parametrize("rows", [4, 150])
def test_module_that_an_adapter_does_not_touch_is_skipped(wrapper: gpu_punica.GpuPunicaWrapper, rows: int) -> None:
    (a, b), other = factors(64), factors(64)
    manager = Manager(
        {"router": dense_module(*a), "qkv": dense_module(*other[0])}, {11: {"qkv"}, 7: {"router", "qkv"}}, IDS
    )
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
