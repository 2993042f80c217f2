"""Which CUDA graphs vLLM captures, and what its attention sees of them."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.utils import AttentionGroup

from lorahost_kernels.vllm_026 import patching, prefill_graphs


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patched for this test only."""
    targets = (
        (VllmConfig, "try_verify_and_update_config"),
        (VllmConfig, "_set_cudagraph_sizes"),
        (AttentionGroup, "create_metadata_builders"),
        (CudagraphDispatcher, "get_capture_descs"),
    )
    for owner, name in targets:
        # another test of this process may have patched them for good
        found = patching._originals.get(patching.qualified_name(owner, name), getattr(owner, name))
        monkeypatch.setattr(owner, name, found)
    monkeypatch.setattr(patching, "_originals", {})
    prefill_graphs.apply_patches()


def config(
    seqs: int = 16, batched: int = 8192, architecture: str = "MixtralForCausalLM", drafts: int = 0, **more: Any
) -> Any:
    """What these methods read of a VllmConfig."""
    graphs = {
        "cudagraph_capture_sizes": None, "max_cudagraph_capture_size": None, "compile_sizes": None, "enable_sp": False,
        "cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE,
    }  # fmt: skip
    graphs |= {name: more.pop(name) for name in graphs if name in more}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            enforce_eager=False, architecture=architecture, is_hybrid=False, convert_type="none"
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=batched),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=more.pop("data_parallel_size", 1)),
        structured_outputs_config=SimpleNamespace(reasoning_parser="x"),
        compilation_config=SimpleNamespace(
            post_init_cudagraph_sizes=lambda: None,
            pass_config=SimpleNamespace(enable_sp=graphs.pop("enable_sp")),
            **graphs,
        ),
        num_speculative_tokens=drafts,
        performance_mode="balanced",
        lora_config=more.pop("lora_config", object()),
        **more,
    )


def chosen(found: Any) -> list[int]:
    """The sizes after both of vLLM's steps."""
    VllmConfig.try_verify_and_update_config(found)
    VllmConfig._set_cudagraph_sizes(found)
    sizes: list[int] = found.compilation_config.cudagraph_capture_sizes
    assert found.compilation_config.max_cudagraph_capture_size == sizes[-1]
    return sizes


def stock(found: Any) -> list[int]:
    """The sizes without our patches."""
    patching.original(VllmConfig, "try_verify_and_update_config")(found)
    patching.original(VllmConfig, "_set_cudagraph_sizes")(found)
    sizes: list[int] = found.compilation_config.cudagraph_capture_sizes
    return sizes


@pytest.mark.parametrize("low", [1, 8, 32, 33, 250, 512, 1000, 4096])
@pytest.mark.parametrize("high", [512, 1000, 2048, 8192])
def test_ladder(low: int, high: int) -> None:
    sizes = prefill_graphs.ladder(low, high)
    assert (not sizes) == (low >= high)
    for before, size in pairwise([low, *sizes]):
        assert before < size <= high
        assert size - before <= max(16, before / (8 if before >= prefill_graphs.COARSE_BELOW else 4))
    assert not sizes or sizes[-1] == high


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "GptOssForCausalLM"])
@pytest.mark.parametrize("seqs", [1, 16, 256, 1024])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("batched", [2048, 8192, 16384])
def test_sizes_go_up_to_the_batch_and_keep_those_of_decode(
    architecture: str, seqs: int, drafts: int, batched: int
) -> None:
    wanted = [s for s in stock(config(seqs, batched, architecture, drafts)) if s <= seqs * (1 + drafts)]
    found = config(seqs, batched, architecture, drafts)
    sizes = chosen(found)
    assert sizes[: len(wanted)] == wanted
    assert sizes[-1] == min(batched, prefill_graphs.LARGEST)
    assert sizes == sorted(set(sizes))
    limit = prefill_graphs.decode_limit(found)
    assert limit >= seqs * (1 + drafts)
    assert len([s for s in sizes if s > limit]) <= 50


@pytest.mark.parametrize(
    "given",
    [
        {"cudagraph_capture_sizes": [1, 2, 64]},
        {"max_cudagraph_capture_size": 128},
        {"compile_sizes": [1000]},
        {"lora_config": None},
        {"data_parallel_size": 2},
        {"enable_sp": True},
        {"cudagraph_mode": CUDAGraphMode.FULL},
        {"cudagraph_mode": CUDAGraphMode.FULL_DECODE_ONLY},
        {"batched": 16},
    ],
)
@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "GptOssForCausalLM"])
def test_what_is_not_ours_stays(given: dict[str, Any], architecture: str) -> None:
    assert chosen(config(**given, architecture=architecture)) == stock(config(**given, architecture=architecture))


@pytest.mark.parametrize(("drafts", "largest"), [(1, 8192), (2, 8190), (3, 8192), (4, 8190)])
def test_the_largest_size_is_of_whole_requests(drafts: int, largest: int) -> None:
    assert chosen(config(drafts=drafts))[-1] == largest


def test_without_graphs_there_are_none() -> None:
    found = config(cudagraph_mode=CUDAGraphMode.NONE)
    VllmConfig._set_cudagraph_sizes(found)
    assert found.compilation_config.max_cudagraph_capture_size == 0


def build(found: Any, fails: bool = False) -> tuple[list[int], int]:
    """(sizes, largest) that an attention's builder sees."""
    seen: list[tuple[list[int], int]] = []

    def builder(spec: Any, layers: Any, vllm_config: Any, device: Any) -> None:
        graphs = vllm_config.compilation_config
        seen.append((graphs.cudagraph_capture_sizes, graphs.max_cudagraph_capture_size))
        if fails:
            raise ValueError("no builder")

    backend: Any = SimpleNamespace(get_builder_cls=lambda: builder)
    group = AttentionGroup(backend, [], None, 0)  # type: ignore[arg-type]
    before = vars(found.compilation_config).copy()
    try:
        group.create_metadata_builders(found, None, kernel_block_size=None)
    except ValueError:
        assert fails
    assert vars(found.compilation_config) == before
    return seen[0]


@pytest.mark.parametrize("fails", [False, True])
def test_attention_sees_the_sizes_of_decode(fails: bool) -> None:
    found = config()
    sizes = chosen(found)
    seen, largest = build(found, fails)
    assert seen == [s for s in sizes if s <= 32]
    assert largest == seen[-1] == 32


@pytest.mark.parametrize(("drafts", "seqs"), [(2, 171), (2, 250), (5, 100), (6, 100)])
def test_attention_is_told_of_graphs_of_decode_that_are_rounded_up(drafts: int, seqs: int) -> None:
    found = config(seqs, drafts=drafts)
    sizes = chosen(found)
    tokens = seqs * (1 + drafts)
    rounded = [-(-size // (1 + drafts)) * (1 + drafts) for size in sizes if size <= tokens]
    assert build(found)[1] >= max(size for size in rounded if size <= tokens)


def test_attention_in_the_graph_sees_all_sizes() -> None:
    found = config(cudagraph_mode=CUDAGraphMode.FULL, cudagraph_capture_sizes=[1, 32, 4096])
    sizes = chosen(found)
    assert build(found) == (sizes, 4096)


def test_attention_sees_decodes_sizes_of_those_that_a_user_gives() -> None:
    found = config(cudagraph_capture_sizes=[1, 32, 4096])
    chosen(found)
    assert build(found) == ([1, 32], 32)


def test_the_two_largest_with_adapters_come_first() -> None:
    """Of them vLLM makes its estimate of memory: the second by the number of graphs."""
    keys = {BatchDescriptor(n, has_lora=bool(a), num_active_loras=a) for n in (16, 512, 8192) for a in (0, 9)}
    dispatcher: Any = SimpleNamespace(
        keys_initialized=True,
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        cudagraph_keys={CUDAGraphMode.PIECEWISE: keys, CUDAGraphMode.FULL: set()},
    )
    ((mode, found),) = CudagraphDispatcher.get_capture_descs(dispatcher)
    assert mode == CUDAGraphMode.PIECEWISE
    assert [(d.num_tokens, d.num_active_loras) for d in found] == [
        (8192, 9), (512, 9), (16, 9), (8192, 0), (512, 0), (16, 0),
    ]  # fmt: skip
