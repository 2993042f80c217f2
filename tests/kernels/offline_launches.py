"""What the launchers would launch, recorded without a GPU, and which kernels they launch."""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.runtime import JITFunction

from lorahost_kernels import ops
from lorahost_kernels.configs import MULTIPROCESSORS, PROGRAMS, next_pow2, work_block_m
from lorahost_kernels.ops import layer
from lorahost_kernels.ops.common import defaults, launch, replay
from lorahost_kernels.ops.common.routing import Routing, WorkList
from lorahost_kernels.ops.expert_order.launch import expert_order
from lorahost_kernels.ops.work_list.launch import build_work_list

SLOTS = 8
# compute capability -> (multiprocessors, KiB of shared memory that a program may have): A100, L40S, H200, B200
GPUS = {80: (108, 163), 89: (142, 99), 90: (132, 227), 100: (148, 227)}
# name -> (product of ops.layer, experts, topk, in, out of each slice, rank); experts None: a dense layer
SHAPES: dict[str, tuple[str, int | None, int, int, tuple[int, ...], int]] = {
    "gpt-oss-20b gate_up": ("gate_up", 32, 4, 2880, (5760,), 32),
    "gpt-oss-20b down": ("down", 32, 4, 2880, (2880,), 32),
    "qwen3-30b gate_up": ("gate_up", 128, 8, 2048, (768, 768), 32),
    "gpt-oss-20b qkv": ("linear", None, 1, 2880, (4096, 512, 512), 32),
    "mixtral gate_up rank 256": ("gate_up", 8, 2, 4096, (14336, 14336), 256),
    "swiglu rank 32": ("gate_up_swiglu", 32, 4, 2880, (5760,), 32),
    "swiglu rank 256": ("gate_up_swiglu", 32, 4, 2880, (5760,), 256),
    "topk sum": ("down_topk_sum", 32, 4, 2880, (2880,), 32),
}


@dataclass(frozen=True)
class Call:
    """One launch that was recorded instead of made."""

    kernel: Any
    arguments: dict[str, Any]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def recorded(product: Callable[[], object]) -> list[Call]:
    """What a product launches."""
    calls: list[Call] = []

    def record(kernel: Any, key: Any, pointers: tuple[Tensor, ...], constants: Callable[[], Any]) -> None:
        _, args, options, specialize = constants()
        kernel = replay.specialized(kernel) if specialize else kernel
        calls.append(Call(kernel, {**dict(zip(kernel.arg_names, pointers, strict=False)), **args, **options}))

    with mock.patch.object(replay, "launch", record):
        product()
    return calls


@contextmanager
def pretended(capability: int) -> Iterator[None]:
    """Makes launchers choose what they choose on the GPU of GPUS with this compute capability."""
    multiprocessors, shared = GPUS[capability]
    with ExitStack() as stack:
        # what was chosen on another GPU is not asked for again
        stack.enter_context(mock.patch.object(launch, "_choices", {}))
        for module in [m for m in modules() if hasattr(m, "has_pdl")]:
            stack.enter_context(mock.patch.object(module, "has_pdl", return_value=capability >= 90))
        programs = PROGRAMS * multiprocessors // MULTIPROCESSORS
        stack.enter_context(mock.patch.object(defaults, "programs_of", return_value=programs))
        stack.enter_context(mock.patch.object(defaults, "shared_limit_of", return_value=shared * 1024))
        yield


def launches(product: str, tokens: int, dtype: torch.dtype = torch.bfloat16, capability: int = 90) -> list[Call]:
    """The launches of one product with the default tiles of a GPU of GPUS."""
    with pretended(capability):
        return product_launches(product, tokens, dtype)


def product_launches(product: str, tokens: int, dtype: torch.dtype) -> list[Call]:
    """The launches of one product on the GPU that is pretended."""
    ids, gates = meta(tokens, 4, dtype=torch.int32), meta(tokens, 4, dtype=torch.float32)
    if product == "work list":
        routing = Routing(ids[:, 0], meta(SLOTS + 1, dtype=torch.int32), 32, ids)
        return recorded(lambda: build_work_list(routing, SLOTS, 32))
    if product == "expert order":
        # the tile height of the base GEMM, as vllm_026.oai_experts picks it
        block_m = max(16, min(next_pow2(max(1, tokens * 4 // 32)), 128))
        return recorded(lambda: expert_order(ids, gates, 32, block_m, dtype))
    return layer_launches(product, tokens, dtype)


def layer_launches(name: str, tokens: int, dtype: torch.dtype) -> list[Call]:
    """The launches of one layer; none where the engine runs another product.

    Of products whose expand takes over the step behind it that expand alone: their shrinks are those of the others.
    """
    product, experts, topk, k, widths, rank = SHAPES[name]
    pairs, fused = tokens * topk, product in ("gate_up_swiglu", "down_topk_sum")
    block_m = work_block_m(pairs, SLOTS * (experts or 1), rank)
    if product == "down_topk_sum" and block_m is not None:
        return []
    index: dict[str, Any] = {"dtype": torch.int32}
    routing = Routing(
        meta(tokens, **index), meta(SLOTS + 1, **index), experts or 1,
        meta(tokens, topk, **index) if experts else None,
        meta(tokens, topk, dtype=torch.float32) if experts else None,
        meta(pairs, **index) if fused else None,
        None if block_m is None else WorkList(meta(pairs, **index), meta(1, **index), 100, block_m),
    )  # fmt: skip
    a = [meta(SLOTS, experts or 1, rank, k, dtype=dtype) for _ in widths]
    b = [meta(SLOTS, experts or 1, n, rank, dtype=dtype) for n in widths]
    n = sum(widths)
    x = meta(pairs if product.startswith("down") else tokens, k, dtype=dtype)
    y = meta(tokens, topk, n, dtype=dtype) if experts else meta(tokens, n, dtype=dtype)
    if product == "gate_up_swiglu":
        out, rows = meta(pairs, n // 2, dtype=dtype), y.view(pairs, n)
        return recorded(lambda: layer.gate_up_swiglu(out, rows, x, a[0], b[0], routing, 1.702, 7.0))[1:]
    if product == "down_topk_sum":
        out = meta(tokens, n, dtype=dtype)
        return recorded(lambda: layer.down_topk_sum(out, y, x, a[0], b[0], routing))[1:]
    return recorded(lambda: getattr(layer, product)(y, x, a, b, routing))


def name_of(kernel: Any) -> str:
    """operation.function: two operations have a count_kernel."""
    return f"{kernel.__module__.split('.')[-2]}.{kernel.__name__}"


def modules() -> list[ModuleType]:
    """All modules of lorahost_kernels.ops."""
    return [importlib.import_module(m.name) for m in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}.")]


def named(code: CodeType) -> set[str]:
    """The names that a function's code and the functions in it read."""
    return {*code.co_names}.union(*(named(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def launched() -> set[str]:
    """The kernels that launchers launch: those that no kernel calls, and those that a plain function names."""
    here = [v for m in modules() for v in vars(m).values() if getattr(v, "__module__", None) == m.__name__]
    kernels = {v for v in here if isinstance(v, JITFunction)}

    def used_by(functions: Iterable[FunctionType]) -> set[Any]:
        found = [f.__globals__.get(name) for f in functions for name in named(f.__code__)]
        return {v for v in found if isinstance(v, JITFunction)}

    called = used_by(kernel.fn for kernel in kernels)
    by_launchers = used_by(v for v in here if isinstance(v, FunctionType))
    return {name_of(kernel) for kernel in (kernels - called) | by_launchers}
