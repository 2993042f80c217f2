"""Times gate_up at prefill for GPT-OSS-20B: the expand and then the activation, against the expand that activates.

python -m bench.swiglu [--m 1600 8192] [--base 0.0 0.5] [--rank 32] [--sweep]

Expands only: shrink and work list are the same for both. The activation is vLLM's operator where vLLM is installed,
else a Triton kernel of this file; each row says which. Every graph has calls on different layers, larger than the
L2 in sum; outputs are first compared with float64, and 1 is the exit code if ours is off by 5e-3 or more.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench import cases
from lorahost_kernels.configs import ExpandConfig, cdiv, work_block_m
from lorahost_kernels.ops.common.routing import Routing
from lorahost_kernels.ops.expand_swiglu import naive
from lorahost_kernels.ops.expand_swiglu.launch import expand_swiglu
from lorahost_kernels.ops.gate_up_expand.launch import gate_up_expand
from lorahost_kernels.ops.gate_up_shrink.launch import gate_up_shrink
from lorahost_kernels.ops.work_list.launch import build_work_list
from lorahost_kernels.tune.timing import Spread, graph_us, relative_error
from lorahost_kernels.tuned.legal import unsafe

ALPHA, LIMIT = 1.702, 7.0
SHAPE = cases.MOE["gpt-oss-20b"]
SLOTS, ADAPTERS, LAYERS, CALLS = 8, 8, 4, 20
WORST = 5e-3
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
Activation = Callable[[Tensor, Tensor], object]


@triton.jit
def activation_kernel(out, y, N, alpha, limit, BLOCK: tl.constexpr):
    """out[row] = swiglu(y[row]) for one row; gate and up alternate."""
    row = tl.program_id(0).to(tl.int64)
    for first in range(0, N, BLOCK):
        cols = 2 * first + tl.arange(0, 2 * BLOCK)
        both = tl.load(y + row * 2 * N + cols, mask=cols < 2 * N, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(both, [BLOCK, 2]))
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        value = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
        outs = first + tl.arange(0, BLOCK)
        tl.store(out + row * N + outs, value.to(out.dtype.element_ty), mask=outs < N)


def own_activation(out: Tensor, y: Tensor) -> None:
    """This file's activation, one program a row."""
    activation_kernel[(len(y),)](out, y, out.shape[1], ALPHA, LIMIT, BLOCK=1024, num_warps=4)


def activations() -> dict[str, Activation]:
    """By name: this file's kernel, and vLLM's operator if it can be imported."""
    found: dict[str, Activation] = {"this file's Triton kernel": own_activation}
    try:
        import vllm._custom_ops  # noqa: F401  registers torch.ops._C

        swigluoai = torch.ops._C.swigluoai_and_mul
    except (ImportError, AttributeError):
        return found
    return {"vLLM's swigluoai_and_mul": lambda out, y: swigluoai(out, y, ALPHA, LIMIT), **found}


@dataclass(frozen=True)
class Prefill:
    """One layer's gate_up between the shrink and the down product."""

    out: Tensor
    y: Tensor
    h: Tensor
    b: Tensor
    routing: Routing

    def fused(self, config: ExpandConfig | None = None) -> None:
        """expand_swiglu by tiles."""
        expand_swiglu(self.out, self.y, self.h, self.b, self.routing, ALPHA, LIMIT, config=config)

    def expand(self) -> None:
        """gate_up_expand alone, y in place."""
        gate_up_expand(self.y, self.h, (self.b,), self.routing)

    def unfused(self, activation: Activation) -> None:
        """gate_up_expand, then the activation."""
        self.expand()
        activation(self.out, self.y)


def prefill(tokens: int, rank: int, base: float) -> Prefill:
    """Random inputs; a share of `base` of the tokens, one run of them as in a batch of requests, has no adapter."""
    layer, _ = cases.moe_layer(replace(SHAPE, rank=rank), tokens, SLOTS, ADAPTERS, DEVICE, DTYPE)
    layer.routing.token_slots[: int(tokens * base)] = -1
    ids = layer.routing.topk_ids
    assert ids is not None
    order = ids.flatten().argsort(stable=True)
    rows = torch.empty_like(order, dtype=torch.int32)
    rows[order] = torch.arange(order.numel(), dtype=torch.int32, device=DEVICE)
    routing = replace(layer.routing, pair_rows=rows, topk_weights=None)
    block_m = work_block_m(routing.num_pairs, SLOTS * SHAPE.experts, rank)
    if block_m is None:
        raise ValueError(f"a batch of {tokens} tokens has no work list")
    routing = build_work_list(routing, SLOTS, block_m)
    torch.cuda.synchronize()  # the shrink must not come right behind what writes its routing
    y = layer.y.flatten(0, 1)
    out = torch.empty(len(y), y.shape[1] // 2, dtype=y.dtype, device=DEVICE)
    return Prefill(out, y, gate_up_shrink(layer.x, layer.lora_a, routing), layer.lora_b[0], routing)


def error(layer: Prefill, call: Callable[[], object]) -> float:
    """Relative error of `out` after the call, from a fresh base output."""
    layer.y.normal_()
    want = torch.empty_like(layer.out, dtype=torch.float64)
    naive.expand_swiglu(want, layer.y, layer.h, layer.b, layer.routing, ALPHA, LIMIT)
    call()
    return relative_error(layer.out, want)


def sweep(block_m: int) -> list[ExpandConfig]:
    """Tiles to try for a list of `block_m` rows a tile."""
    found = [
        ExpandConfig("list", block_m, n, steps, warps, stages)
        for n, steps, warps, stages in itertools.product((64, 128), (1, 3, 5, 9, 15), (2, 4), (2, 3, 4))
    ]
    return [c for c in found if not unsafe(c) and cdiv(2 * SHAPE.intermediate, c.block_n) >= c.steps]


def show(name: str, time: Spread, wrong: float, moved: float) -> None:
    """One printed row; moved: bytes that have to be read and written."""
    rate = moved / time.p50 / 1e6
    print(
        f"  {name:<58} {time.p50:8.1f} ({time.p20:.1f}-{time.p80:.1f}) us  {rate:5.2f} TB/s  err {wrong:.1e}",
        flush=True,
    )


def moved_bytes(layer: Prefill, fused: bool) -> float:
    """y, out and the weights of all groups once (unfused: y three times), without h."""
    y = layer.y.nbytes
    return (y if fused else 3 * y) + layer.out.nbytes + layer.b.nbytes


def compare(tokens: int, rank: int, base: float, wide: bool) -> bool:
    """Prints one batch size; whether all outputs are right."""
    layers = [prefill(tokens, rank, base) for _ in range(LAYERS)]
    repeat = [*layers] * cdiv(CALLS, LAYERS)
    work = layers[0].routing.work
    assert work is not None
    print(f"M={tokens} rank={rank} base rows={base:.0%} tiles of {work.block_m} rows")
    errors = []

    def row(name: str, act: Callable[[Prefill], object], moved: float) -> None:
        errors.append(error(layers[0], lambda: act(layers[0])))
        show(name, graph_us([lambda layer=layer: act(layer) for layer in repeat]), errors[-1], moved)  # type: ignore[misc]

    row("expand_swiglu by tiles", Prefill.fused, moved_bytes(layers[0], True))
    for name, activation in activations().items():
        row(f"gate_up_expand + {name}", lambda p, a=activation: p.unfused(a), moved_bytes(layers[0], False))  # type: ignore[misc]
    show(
        "gate_up_expand alone",
        graph_us([p.expand for p in repeat]),
        float("nan"),
        moved_bytes(layers[0], False) - layers[0].y.nbytes,
    )
    for config in sweep(work.block_m) if wide else []:
        name = f"block_n={config.block_n} steps={config.steps} warps={config.num_warps} stages={config.num_stages}"
        try:
            row(name, lambda p, c=config: p.fused(c), moved_bytes(layers[0], True))  # type: ignore[misc]
        except Exception as failure:  # tiles that don't compile are a row, not the end
            print(f"  {name:<58} {type(failure).__name__}: {failure}"[:120])
    return all(e < WORST for e in errors)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 1 if an output is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m", nargs="+", type=int, default=[1600, 8192])
    parser.add_argument("--base", nargs="+", type=float, default=[0.0, 0.5], help="shares of tokens without an adapter")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--sweep", action="store_true", help="also other tiles of expand_swiglu")
    args = parser.parse_args(arguments)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    right = [compare(tokens, args.rank, base, args.sweep and not base) for tokens in args.m for base in args.base]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
