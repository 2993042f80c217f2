"""`bench.tuned` without a GPU: which points, which candidates are compiled ahead, which claims hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from bench import tuned

from lorahost_kernels import configs
from lorahost_kernels.configs import ExpandConfig, ShrinkConfig
from lorahost_kernels.tune import gpu, measure
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tuned.shape import KNOWN
from lorahost_kernels.tuned.start import Device

SHAPE = KNOWN["gpt-oss-20b"]
RUN = {"driver": "1", "torch": "2", "triton": "3", "git_revision": "a", "date": "2026-11-29", "mix": "m"}
SHRINK = {"mode": "pair", "block_k": 512, "split_k": 3, "ranks": 4, "num_warps": 2}
EXPAND = {"mode": "pair", "block_n": 32, "steps": 2, "num_warps": 1}


def rows() -> tuple[dict[str, Any], dict[str, Any]]:
    times = {"before_us": 2.0, "after_us": 1.5}
    return {"config": SHRINK, **times}, {"config": EXPAND, **times}


def write(path: Path, points: Sequence[tuple[int, int, int]]) -> Path:
    shrink, expand = rows()
    moe = SHAPE.moe
    assert moe is not None
    heads = [{"run": 0, "adapters": a, "rank": r, "tokens": m, "before_us": 9.0, "after_us": 8.0} for a, r, m in points]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({
        "format": 1, "gpu": "NVIDIA H200", "model": SHAPE.name, "experts": vars(moe), "runs": [RUN],
        "modules": {n: {"k": m.k, "outs": list(m.outs)} for n, m in SHAPE.modules.items()},
        "moe": [
            {**h, "gate_up_shrink": shrink, "gate_up_expand": expand, "down_shrink": shrink, "down_expand": expand}
            for h in heads
        ],
        "dense": [
            {**h, "modules": {n: {"shrink": shrink, "expand": expand} for n in SHAPE.modules}} for h in heads
        ],
    }))  # fmt: skip
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files' folder; a GPU that isn't there."""
    monkeypatch.setenv("LORAHOST_CONFIG_DIR", str(tmp_path))
    monkeypatch.delenv("VLLM_TUNED_CONFIG_FOLDER", raising=False)
    monkeypatch.setattr(tuned, "this_device", lambda: Device("NVIDIA H200", (9, 0), 132, 227 * 1024))
    write(tmp_path / "NVIDIA_H200" / "m.json", [(8, 32, 1), (8, 32, 4), (8, 16, 1), (1, 32, 1)])
    return tmp_path


def test_the_points_are_those_of_the_slots_and_of_both_files(folder: Path) -> None:
    found = tuned.setup(SHAPE, 8, None)
    assert [str(p) for p in found.places if p.family == "moe"] == ["moe 8x16 M=1", "moe 8x32 M=1", "moe 8x32 M=4"]
    assert found.choosers[0] is None
    other = write(folder / "again.json", [(8, 32, 4), (8, 32, 8), (1, 32, 1)])
    both = tuned.setup(SHAPE, 8, other)
    assert both.places == [Place("moe", 4), Place("dense", 4)]
    assert both.choosers[0] is not None
    assert {p.source for p in both.choosers[1].table.families["moe"].points.values()} == {"again.json"}


def test_the_defaults_and_the_tuned_tiles_are_compiled_ahead(folder: Path) -> None:
    found = tuned.setup(SHAPE, 1, None)
    work = list(tuned.candidates(SHAPE, found, 227 * 1024, 800))
    mine = (ShrinkConfig(**SHRINK), ExpandConfig(**EXPAND))
    assert [p.half or "dense" for p, pair in work if pair == mine] == ["gate_up", "down", "dense", "dense"]
    assert len(work) == 8


def test_fused_experts_are_compared_as_an_engine_of_theirs_takes_them(folder: Path) -> None:
    path = folder / "NVIDIA_H200" / "m.json"
    content = json.loads(path.read_text())
    shrink, expand = rows()
    expand = {**expand, "config": {"mode": "pair", "block_n": 32, "num_warps": 1}}
    head = {"run": 0, "adapters": 1, "rank": 32, "tokens": 2, "before_us": 9.0, "after_us": 8.0}
    ops = {"gate_up_shrink": shrink, "expand_swiglu": expand, "down_shrink": shrink, "expand_topk_sum": expand}
    path.write_text(json.dumps({**content, "moe_fused": [{**head, **ops}]}))
    assert [str(p) for p in tuned.setup(SHAPE, 1, None).places] == ["moe 1x32 M=1", "dense 1x32 M=1"]
    found = tuned.setup(SHAPE, 1, None, fused_experts=True)
    assert [str(p) for p in found.places] == ["moe_fused 1x32 M=2"]
    work = list(tuned.candidates(SHAPE, found, 227 * 1024, 800))
    mine = (ShrinkConfig(**SHRINK), ExpandConfig("pair", block_n=32, num_warps=1))
    assert [(p.half, p.fused) for p, pair in work if pair == mine] == [("gate_up", True), ("down", True)]
    assert len(work) == 4


def test_claims() -> None:
    def claims(default: float, new: float, noise: float = 0.0, floor: float = 1.0, again: bool = False) -> list[str]:
        return tuned.Compared(default, new, noise, floor).claims(again)

    assert claims(10, 9) == []
    assert claims(10, 10.2) == ["slower", "under 5 %"]
    assert claims(10, 10.2, noise=0.03, floor=9) == []
    assert claims(10, 9.8, floor=9) == []
    assert claims(10, 9.8) == ["under 5 %"]
    assert claims(10, 10.29, again=True) == []
    assert claims(10, 10.4, again=True) == ["over 3 % slower"]


def test_a_whole_comparison(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything but kernels and the GPU's clock is real; each chooser is asked where a launch would ask it."""
    asked: list[tuple[str, object]] = []

    def product(kind: str) -> Callable[..., None]:
        def call(y: object, x: object, a: Any, b: Any, routing: Any) -> None:
            chooser = configs.chooser()
            columns = tuple(t.shape[2] for t in b)
            operation = "expand" if kind == "dense" else f"{kind}_expand"
            sizes = (routing.num_tokens, routing.topk, routing.num_experts, a[0].shape[0], a[0].shape[2], columns)
            asked.append((kind, chooser and chooser.tiles(configs.Launch(operation, *sizes, None, 2))))

        return call

    class Graph:
        def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
            self.calls = [call() for call in calls]

        def replay(self) -> None: ...

        def reset(self) -> None: ...

    real = measure.Workbench

    def small(shape: Any, family: str, slots: int, rank: int, device: object, l2_bytes: int) -> measure.Workbench:
        return real(shape, family, slots, rank, torch.device("cpu"), l2_bytes=1)

    monkeypatch.setattr(measure, "LEAST_CALLS", 2)
    monkeypatch.setattr(tuned, "Workbench", small)
    monkeypatch.setattr(tuned, "RUNS", {kind: product(kind) for kind in tuned.RUNS})
    monkeypatch.setattr(tuned, "capture", Graph)
    monkeypatch.setattr(tuned, "replay_us", lambda graph, replays: [20.0] * replays)
    monkeypatch.setattr(tuned, "this_gpu", lambda: gpu.Gpu("NVIDIA H200", 227 * 1024, 60, 800, 90, 4e12))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    csv = folder / "x.csv"
    monkeypatch.setattr(
        "sys.argv", ["x", "--models", SHAPE.name, "--adapters", "1", "--jobs", "0", "--csv", str(csv), "--rev", "r"]
    )
    assert tuned.main() == 1
    text = capsys.readouterr().out
    assert "compiled 8 candidates" in text
    assert "all: 2 points, geometric mean 1.000 x, 1.000 to 1.000" in text
    assert "claims that don't hold: 2 points under 5 %" in text
    mine = ExpandConfig(**EXPAND)
    experts = [("gate_up", None), ("down", None)] * 2 + [("gate_up", mine), ("down", mine)] * 2
    # once more for dense layers, whose lists are built before the graph
    assert asked == experts + [("dense", None)] * 6 + [("dense", mine)] * 6
    assert len(csv.read_text().splitlines()) == 3
    assert configs.chooser() is None
