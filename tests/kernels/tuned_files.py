"""Tuned configuration files as tests want them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GPU = "NVIDIA H200"
MOE = {"experts": 32, "topk": 4, "hidden": 2880, "intermediate": 2880, "slices": 1}
MODULES = {"qkv": {"k": 2880, "outs": [4096, 512, 512]}, "o": {"k": 4096, "outs": [2880]}}
RUN = {"driver": "575.1", "torch": "2.11.0", "triton": "3.6.0", "git_revision": "abc", "date": "2026-11-29", "mix": "m"}
PAIR_SHRINK = {"mode": "pair", "block_k": 1024, "split_k": 1, "ranks": 2, "num_warps": 4}
PAIR_EXPAND = {"mode": "pair", "block_n": 64, "steps": 2, "num_warps": 4}
PAIR_FUSED = {"mode": "pair", "block_n": 32, "num_warps": 2}


def list_shrink(block_m: int) -> dict[str, Any]:
    return {"mode": "list", "block_m": block_m, "block_k": 128, "split_k": 2, "num_warps": 4, "num_stages": 3}


def list_expand(block_m: int) -> dict[str, Any]:
    return {"mode": "list", "block_m": block_m, "block_n": 64, "steps": 4, "num_warps": 2, "num_stages": 3}


def row(config: dict[str, Any]) -> dict[str, Any]:
    return {"config": config, "before_us": 2.0, "after_us": 1.5}


def tiles(block_m: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    shrink, expand = (PAIR_SHRINK, PAIR_EXPAND) if block_m is None else (list_shrink(block_m), list_expand(block_m))
    return row(shrink), row(expand)


def head(adapters: int, rank: int, tokens: int) -> dict[str, Any]:
    place = {"adapters": adapters, "rank": rank, "tokens": tokens}
    return {"run": 0, **place, "before_us": 9.0, "after_us": 8.0}


def moe_point(adapters: int, rank: int, tokens: int, block_m: int | None) -> dict[str, Any]:
    shrink, expand = tiles(block_m)
    ops = {"gate_up_shrink": shrink, "gate_up_expand": expand, "down_shrink": shrink, "down_expand": expand}
    return {**head(adapters, rank, tokens), **ops}


def fused_point(adapters: int, rank: int, tokens: int, block_m: int | None) -> dict[str, Any]:
    shrink, expand = tiles(block_m)
    if block_m is None:
        expand = row(PAIR_FUSED)
    last = "expand_topk_sum" if block_m is None else "down_expand"
    ops = {"gate_up_shrink": shrink, "expand_swiglu": expand, "down_shrink": shrink, last: expand}
    return {**head(adapters, rank, tokens), **ops}


def dense_point(adapters: int, rank: int, tokens: int, block_m: int | None) -> dict[str, Any]:
    shrink, expand = tiles(block_m)
    modules = {name: {"shrink": shrink, "expand": expand} for name in MODULES}
    return {**head(adapters, rank, tokens), "modules": modules}


def document(**changes: Any) -> dict[str, Any]:
    return json.loads(
        json.dumps(
            {
                "format": 1, "gpu": GPU, "model": "gpt-oss-20b", "experts": MOE, "modules": MODULES, "runs": [RUN],
                "moe": [moe_point(8, 32, 16, None), moe_point(8, 32, 512, 32)],
                "dense": [dense_point(8, 32, 16, None), dense_point(8, 32, 512, 64)],
            } | changes
        )
    )  # fmt: skip


def fused_document(**changes: Any) -> dict[str, Any]:
    """With experts in both families."""
    points = [fused_point(8, 32, 16, None), fused_point(8, 32, 512, 16)]
    return document(**{"moe_fused": json.loads(json.dumps(points))} | changes)


def saved(folder: Path, content: Any, name: str = "NVIDIA_H200/gpt-oss-20b.json") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
    return path
