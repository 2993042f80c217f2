"""The base GEMMs of the OAI Triton experts (MXFP4): their time by which of a grid's programs have work.

python -m bench.expert_tiles [--m 1 16 ...] [--before 0 1 ...]

Each graph has LAYERS times the order of the experts' rows, a launch of `--before` programs that do nothing (none if 0),
and one GEMM with weights of its own. The GEMM is once as vLLM launches it and once with the busy programs first, with
all tokens on the same experts and with each token's experts drawn. Their outputs must be equal bit for bit, else a row
is red. Rows go to bench/results/expert_tiles.csv. Needs triton_kernels, which vLLM carries in vllm/third_party.
"""

import argparse
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from bench.csv_rows import append
from bench.kernels import COLUMNS, DEVICE, TURNS, Result, revision, rows
from lorahost_kernels.ops.expert_order.launch import expert_order
from lorahost_kernels.tune.timing import Spread, capture, replay_us, spread
from lorahost_kernels.vllm_026 import expert_tiles

EXPERTS, TOPK, HIDDEN, WIDTH = 32, 4, 2880, 2880  # of GPT-OSS-20B
SAME = (3, 11, 19, 30)  # experts of all tokens
LAYERS = 12
REPLAYS = 20
ORDERS = {"as vLLM": 1, "busy first": expert_tiles.XCD_SWIZZLE, "busy first, by 8": 8}


@triton.jit
def idle_kernel() -> None:
    """Nothing."""


@dataclass
class Weights:
    """One layer's gate_up and down in the layout of Hopper's MXFP4 GEMM, each with its scales."""

    gate_up: tuple[Any, Any]
    down: tuple[Any, Any]


def random_weight(n: int, k: int) -> tuple[Any, Any]:
    """(E, k, n) packed and laid out as vLLM does, with the precision that has its scales."""
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig  # type: ignore[import-not-found]
    from triton_kernels.numerics import InFlexData  # type: ignore[import-not-found]
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor  # type: ignore[import-not-found]
    from triton_kernels.tensor_details import layout  # type: ignore[import-not-found]

    codes = torch.randint(0, 256, (EXPERTS, n, k // 2), dtype=torch.uint8, device=DEVICE)
    scales = torch.randint(115, 119, (EXPERTS, n, k // 32), dtype=torch.uint8, device=DEVICE)
    scales = torch.nn.functional.pad(scales, (0, -(k // 32) % 4))
    kind, options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    weight = convert_layout(wrap_torch_tensor(codes.transpose(-2, -1), dtype=FP4), kind, **options)
    kind, options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    scale = convert_layout(wrap_torch_tensor(scales.transpose(-2, -1)), kind, **options)
    return weight, PrecisionConfig(weight_scale=scale, flex_ctx=FlexCtx(rhs_data=InFlexData()))


def routing_of(ids: torch.Tensor) -> tuple[Any, Any, Any]:
    """(RoutingData, GatherIndx, ScatterIndx) as the plugin makes them for topk_ids (tokens, TOPK)."""
    from triton_kernels.routing import (  # type: ignore[import-not-found]
        ExptData,
        GatherIndx,
        RoutingData,
        ScatterIndx,
    )

    block_m = max(16, min(triton.next_power_of_2(max(1, ids.numel() // EXPERTS)), 128))
    order = expert_order(ids, torch.full(ids.shape, 0.25, device=DEVICE), EXPERTS, block_m, torch.bfloat16)
    tiles = ExptData(order.expert_rows, order.first_row, {block_m: order.first_tile}, {block_m: order.tile_map})
    routing = RoutingData(order.row_weights, order.expert_rows, EXPERTS, TOPK, tiles)
    gather, scatter = GatherIndx(order.row_pairs, order.pair_rows), ScatterIndx(order.pair_rows, order.row_pairs)
    return routing, gather, scatter


def call_of(product: str, weights: Weights, ids: torch.Tensor, x: torch.Tensor, y: torch.Tensor, before: int) -> None:
    """One layer's launches; x: (tokens, HIDDEN) for gate_up, (pairs, WIDTH) for down."""
    from triton_kernels.matmul_ogs import matmul_ogs

    routing, gather, scatter = routing_of(ids)
    if before:
        idle_kernel[(before,)]()
    if product == "gate_up":
        weight, precision = weights.gate_up
        matmul_ogs(x, weight, None, routing, gather_indx=gather, precision_config=precision, y=y)
    else:
        routing.n_expts_act = 1
        weight, precision = weights.down
        matmul_ogs(
            x, weight, None, routing, scatter_indx=scatter, precision_config=precision, gammas=routing.gate_scal, y=y
        )


def measure(product: str, layers: list[Weights], experts: str, tokens: int, before: int) -> list[Result]:
    """One result for each of ORDERS, timed in turns; microseconds a layer, the launches before the GEMM included."""
    pairs, out = tokens * TOPK, 2 * WIDTH if product == "gate_up" else HIDDEN
    x = torch.randn(tokens if product == "gate_up" else pairs, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    y = torch.zeros(1, pairs, out, device=DEVICE, dtype=torch.bfloat16)
    graphs, outputs, times = {}, [], {}
    ids = [ids_of(experts, tokens, seed) for seed in range(len(layers))]
    for name, swizzle in ORDERS.items():
        expert_tiles.XCD_SWIZZLE = swizzle
        calls: list[Callable[[], None]] = [
            partial(call_of, product, w, i, x, y, before) for w, i in zip(layers, ids, strict=True)
        ]
        graphs[name] = capture(calls)
        y.fill_(float("nan"))
        graphs[name].replay()
        outputs.append(y.clone())
        times[name] = list[Spread]()
    for _ in range(TURNS):
        for name, graph in graphs.items():
            for _ in range(3):
                graph.replay()
            times[name].append(spread(replay_us(graph, REPLAYS), LAYERS))
    middle = [sorted(found, key=lambda t: t.p50)[len(found) // 2] for found in times.values()]
    same = [torch.equal(outputs[0], o) and bool(o.isfinite().all()) for o in outputs]
    return [Result(t, 0.0 if right else float("inf")) for t, right in zip(middle, same, strict=True)]


def everywhere() -> None:
    """Busy programs first in both GEMMs at any size, in those too that the plugin leaves as they are."""
    expert_tiles.second_gemm = lambda flags: True
    expert_tiles.has_idle_programs = lambda pairs, experts, block_m: True


def ids_of(experts: str, tokens: int, seed: int) -> torch.Tensor:
    """topk_ids (tokens, TOPK) int32."""
    if experts == "same":
        return torch.tensor(SAME, dtype=torch.int32, device=DEVICE).repeat(tokens, 1)
    noise = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return noise.topk(TOPK).indices.to(DEVICE, torch.int32)


def main() -> int:
    """Prints the table; 1 if outputs differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m", nargs="+", type=int, default=[1, 4, 16, 32, 64, 128])
    parser.add_argument("--before", nargs="+", type=int, default=[0, 1, 2, 3, 4, 132])
    parser.add_argument("--csv", type=Path, default=Path("bench/results/expert_tiles.csv"))
    parser.add_argument("--rev", default=revision(), help="commit that is measured, where there is no checkout")
    args = parser.parse_args()
    import triton_kernels.matmul_ogs_details.opt_flags as opt_flags  # type: ignore[import-not-found]

    opt_flags.update_opt_flags_constraints({"split_k": 1})  # as vLLM on Hopper
    if problem := expert_tiles.apply_patches():
        raise SystemExit(problem)
    everywhere()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, args.rev)
    layers = [Weights(random_weight(2 * WIDTH, HIDDEN), random_weight(HIDDEN, WIDTH)) for _ in range(LAYERS)]
    red = 0
    for product in ("gate_up", "down"):
        for experts in ("same", "drawn"):
            for tokens in args.m:
                for before in args.before:
                    results = measure(product, layers, experts, tokens, before)
                    right = all(r.error == 0 for r in results)
                    red += not right
                    found = ", ".join(f"{n} {r.time.p50:7.2f}" for n, r in zip(ORDERS, results, strict=True) if r.time)
                    label = f"{product} {experts} M={tokens} before={before}"
                    print(f"{label:<34} {found if right else 'RED: outputs differ'}", flush=True)
                    config = f"gpt-oss-20b mxfp4 experts={experts} before={before} layers={LAYERS}"
                    append(args.csv, COLUMNS, rows(product, tokens, config, args.rev, results, [*ORDERS]))
                    gc.collect()
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
