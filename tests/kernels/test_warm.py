"""Which batch sizes are run before an engine is ready: every set of tiles that traffic can ask for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from lorahost_kernels.configs import work_block_m
from lorahost_kernels.ops.common.defaults import default_expand, default_shrink
from lorahost_kernels.ops.common.routing import Routing, WorkList
from lorahost_kernels.vllm_026 import warm

SLOTS, EXPERTS, TOPK, HIDDEN, WIDTH = 8, 32, 4, 2880, 2880


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def stacked(experts: int, rank: int, k: int, *outs: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """(A, B) of every slice."""
    return tuple(meta(SLOTS, experts, rank, k) for _ in outs), tuple(meta(SLOTS, experts, n, rank) for n in outs)


def modules(rank: int) -> list[Any]:
    """Of a GPT-OSS layer: experts, qkv, and an embedding, which our kernels don't serve."""
    experts = SimpleNamespace(lora_a_stacked=[meta(rank, HIDDEN)])
    experts.w13_lora_a_stacked, experts.w13_lora_b_stacked = stacked(EXPERTS, rank, HIDDEN, 2 * WIDTH)
    experts.w2_lora_a_stacked, experts.w2_lora_b_stacked = stacked(EXPERTS, rank, WIDTH, HIDDEN)
    qkv = BaseLinearLayerWithLoRA.__new__(BaseLinearLayerWithLoRA)
    torch.nn.Module.__init__(qkv)
    qkv.lora_a_stacked, qkv.lora_b_stacked = stacked(1, rank, HIDDEN, 4096, 512, 512)
    return [experts, qkv, SimpleNamespace(lora_a_stacked=meta(SLOTS, rank, HIDDEN))]


def tiles(size: int, rank: int) -> set[object]:
    """What the launchers would choose for a batch of `size` tokens."""
    found: set[object] = set()
    experts, qkv, _ = modules(rank)
    index = {"dtype": torch.int32}
    for name, topk, a, b in (
        ("w13", TOPK, experts.w13_lora_a_stacked, experts.w13_lora_b_stacked),
        ("w2", TOPK, experts.w2_lora_a_stacked, experts.w2_lora_b_stacked),
        ("qkv", 1, qkv.lora_a_stacked, qkv.lora_b_stacked),
    ):
        count, pairs = a[0].shape[1], size * topk
        block_m = work_block_m(pairs, SLOTS * count, rank)
        work = block_m and WorkList(meta(pairs, **index), meta(1, **index), 1, block_m)
        ids = meta(size, topk, **index) if count > 1 else None
        routing = Routing(meta(size, **index), meta(SLOTS + 1, **index), count, ids, work=work)
        found.add((name, default_shrink(routing, a), default_expand(routing, b)))
    return found


@pytest.mark.parametrize(("low", "high"), [(0, 2048), (512, 8192)])
@pytest.mark.parametrize("rank", [8, 32, 256])
def test_every_tile_is_compiled_before_traffic(low: int, high: int, rank: int) -> None:
    known = set(warm.between(low, high))
    sizes = known | set(warm.lora_variants(low, high, warm.products_of(modules(rank), TOPK), known))
    compiled = set[object]().union(*(tiles(size, rank) for size in sizes))
    assert all(low < size <= high for size in sizes)
    # sizes next to a change of tiles are the ones that a coarse ladder misses
    for size in range(low + 1, high + 1, 3):
        assert tiles(size, rank) <= compiled, size


def test_sizes_that_add_nothing_are_left_out() -> None:
    known = set(warm.between(512, 8192))
    added = warm.lora_variants(512, 8192, warm.products_of(modules(32), TOPK), known)
    # tiles of 32 rows with a shrink in two parts: 1025 to 1066 tokens
    assert added
    assert len(added) <= 8
    assert any(1025 <= size <= 1066 for size in added)


@pytest.mark.parametrize("adapters", [True, False])
@pytest.mark.parametrize(
    ("graphs", "eager", "with_adapters", "without"),
    [
        ({"sizes": [1, 64, 512]}, False, 512, 512),
        ({"sizes": [1, 64, 512], "specialize": False}, False, 512, 0),
        ({"sizes": []}, False, 0, 0),
        ({"sizes": [1, 64]}, True, 0, 0),
    ],
)
def test_batches_above_their_largest_graph_are_run(
    graphs: dict[str, Any], eager: bool, with_adapters: int, without: int, adapters: bool
) -> None:
    compilation = SimpleNamespace(
        cudagraph_capture_sizes=graphs["sizes"], cudagraph_specialize_lora=graphs.get("specialize", True)
    )
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(compilation_config=compilation), model_config=SimpleNamespace(enforce_eager=eager)
    )
    assert warm.largest_graph(worker, adapters) == (with_adapters if adapters else without)


def experts_of_kind(name: str, activation: MoEActivation, slices: int = 1, bases: tuple[type, ...] = ()) -> Any:
    """A layer of experts with LoRA, as far as warm-up looks at it."""
    kernel = SimpleNamespace(fused_experts=type(name, bases, {})())
    moe = SimpleNamespace(activation=activation)
    return SimpleNamespace(_moe_kernel=kernel, moe_config=moe, w13_lora_a_stacked=(meta(1),) * slices)


def test_which_experts_run_the_fused_expands() -> None:
    oai, swiglu = "UnfusedOAITritonExperts", MoEActivation.SWIGLUOAI
    derived = experts_of_kind("Mine", swiglu, bases=(type(oai, (), {}),))
    assert all(map(warm.runs_fused_expands, [experts_of_kind(oai, swiglu), derived]))
    others = [
        experts_of_kind("MarlinExperts", swiglu), experts_of_kind(oai, MoEActivation.SILU),
        experts_of_kind(oai, swiglu, slices=2), *modules(32),
    ]  # fmt: skip
    assert not any(map(warm.runs_fused_expands, others))


def test_the_class_of_the_fused_experts_has_the_name_that_is_looked_for() -> None:
    from lorahost_kernels.vllm_026 import oai_experts

    assert oai_experts.Experts.__name__ == "UnfusedOAITritonExperts"


@pytest.mark.parametrize("fused", [True, False])
def test_the_tuned_table_is_told_what_the_experts_run(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "UnfusedOAITritonExperts" if fused else "MarlinExperts"
    found = [*modules(32)[1:], experts_of_kind(name, MoEActivation.SWIGLUOAI)]

    class StartedError(Exception):
        pass

    def start(config: Any, **told: Any) -> None:
        raise StartedError(told)

    monkeypatch.setattr(warm, "original", lambda module, name: lambda worker: None)
    monkeypatch.setattr(warm.tuned, "start", start)
    runner = SimpleNamespace(
        lora_config=SimpleNamespace(max_loras=SLOTS),
        lora_manager=SimpleNamespace(_adapter_manager=SimpleNamespace(modules=dict(enumerate(found)))),
    )
    worker = SimpleNamespace(
        model_runner=runner, model_config=SimpleNamespace(hf_text_config=SimpleNamespace(to_dict=dict)),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, world_size=2),
    )  # fmt: skip
    with pytest.raises(StartedError) as told:
        warm.kernel_warmup(worker)
    assert told.value.args == ({"slots": SLOTS, "tensor_parallel": 2, "fused": fused},)


@pytest.mark.parametrize(
    ("gpus", "drafts", "reason"),
    [(1, None, ""), (2, None, "several GPUs"), (1, object(), "speculative decoding"), (2, object(), "several GPUs")],
)
def test_what_graphs_without_launches_were_not_tried_with(gpus: int, drafts: object, reason: str) -> None:
    config = SimpleNamespace(speculative_config=drafts)
    worker = SimpleNamespace(vllm_config=config, parallel_config=SimpleNamespace(world_size=gpus))
    assert warm.untried(worker) == reason
