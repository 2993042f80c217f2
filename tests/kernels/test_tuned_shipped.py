"""The tuned configurations that are shipped: good files, and what an engine of their model gets from them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.tuned_engine import CONFIG, H200, SHARED
from tests.kernels.tuned_files import GPU, saved

from lorahost_kernels import configs
from lorahost_kernels.configs import Config, work_block_m
from lorahost_kernels.ops.common.defaults import default_expand, default_shrink
from lorahost_kernels.ops.common.routing import Routing, WorkList
from lorahost_kernels.tuned import active as in_use
from lorahost_kernels.tuned import legal, load
from lorahost_kernels.tuned.lines import ConfigError
from lorahost_kernels.tuned.schema import TunedFile, read
from lorahost_kernels.tuned.shape import KNOWN
from lorahost_kernels.tuned.start import Device, start
from lorahost_kernels.tuned.tiles import tiles

FOLDER = Path(__file__).parents[2] / "tuned_configs"
FILES = sorted(FOLDER.rglob("*.json"))
GPT_OSS = FOLDER / "NVIDIA_H200" / "gpt-oss-20b.json"
LIMITS = {GPU: SHARED}  # bytes of shared memory that one program may have
# layer -> (experts, columns in, columns out of each slice, family, module); gate and up are one interleaved slice
LAUNCHES: dict[str, tuple[int, int, tuple[int, ...], str, str]] = {
    "gate_up": (32, 2880, (5760,), "moe", ""),
    "down": (32, 2880, (2880,), "moe", ""),
    "qkv": (1, 2880, (4096, 512, 512), "dense", "qkv"),
    "o": (1, 4096, (2880,), "dense", "o"),
}
SIZES = sorted({*range(1, 70), *(2**i + d for i in range(6, 14) for d in (-1, 0, 1)), *range(91, 8192, 97)} - {8193})
by_file = pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")


@pytest.fixture(autouse=True)
def defaults_again() -> Iterator[None]:
    yield
    in_use.deactivate()


@by_file
def test_a_file_is_read_where_its_gpu_looks_for_it(path: Path) -> None:
    file = read(path)
    assert path in load.files(FOLDER, file.gpu)
    assert (file.moe_shape, file.module_shapes()) == (KNOWN[path.stem].moe, KNOWN[path.stem].modules)
    assert file.model == path.stem
    assert file.moe or file.dense


def test_the_h200_has_gpt_oss_20b() -> None:
    assert GPT_OSS in FILES
    assert load.files(FOLDER, GPU) == [p for p in FILES if p.parent.name == "NVIDIA_H200"]


@by_file
def test_a_file_says_with_what_it_was_measured(path: Path) -> None:
    file = read(path)
    assert {p.run for p in (*file.moe, *file.moe_fused, *file.dense)} == set(range(len(file.runs)))
    for run in file.runs:
        assert re.fullmatch(r"\d+(\.\d+)+", run.driver)
        assert re.match(r"\d+\.\d+\.\d+", run.torch)
        assert re.match(r"\d+\.\d+\.\d+", run.triton)
        # of a commit, not of a tree with changes
        assert re.fullmatch(r"[0-9a-f]{7,40}", run.git_revision)
        assert "uniform" in run.mix


@by_file
def test_every_row_can_run_and_pays(path: Path) -> None:
    file = read(path)
    for point in (*file.moe, *file.moe_fused, *file.dense):
        rows = point.rows()
        assert len(rows) == (2 * len(file.modules) if point in file.dense else 4)
        found = {key: tiles(row.config) for key, row in rows.items()}
        block_m = listed(next(iter(found.values())))
        problems = [legal.problem(c, point.rank, block_m, LIMITS[file.gpu]) for c in found.values()]
        assert [p for p in problems if p] == []
        kept = [row.before_us == row.after_us for row in rows.values()]
        # the times are rounded to a hundredth of a microsecond
        assert point.before_us >= 1.01 * point.after_us - 0.02 if not all(kept) else point.before_us == point.after_us


def listed(config: Config) -> int | None:
    return config.block_m if config.mode == "list" else None


@pytest.mark.parametrize("operation", ["gate_up_expand", "down_expand"])
def test_tiles_that_would_use_unsafe_wgmma_refuse_the_file(tmp_path: Path, operation: str) -> None:
    content = json.loads(GPT_OSS.read_text())
    at, point = next((i, p) for i, p in enumerate(content["moe"]) if p[operation]["config"].get("block_m") == 64)
    assert point[operation]["config"]["num_warps"] <= 2
    point[operation]["config"]["num_warps"] = 4
    path = saved(tmp_path, content)
    with pytest.raises(ConfigError, match=rf"moe\.{at}: .*{operation}: an expand of 64 rows a tile must have at most"):
        read(path)
    found = start(CONFIG, 8, device=H200, environ={load.VARIABLE: str(tmp_path)})
    assert len(found["refused"]) == 1
    assert {op["source"] for op in found["operations"].values()} == {"default"}


@cache
def shipped() -> TunedFile:
    return read(GPT_OSS)


def expected(family: str, slots: int, rank: int, tokens: int) -> Any:
    """The point that docs/tuning.md promises, by its words and not by the table's code."""

    def apart(a: int, b: int) -> Fraction:
        return Fraction(max(a, b), min(a, b))

    points = [p for p in getattr(shipped(), family) if configs.block_r(p.rank) == configs.block_r(rank)]
    near = [p for p in points if apart(p.tokens, tokens) <= 2 and apart(p.adapters, slots) <= 2]
    return min(near, key=lambda p: (apart(p.tokens, tokens) * apart(p.adapters, slots), -p.tokens), default=None)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launched(name: str, slots: int, rank: int, tokens: int) -> tuple[int | None, dict[str, Config]]:
    """The work list that an engine builds for a layer, and the tiles that its launchers take: by operation."""
    experts, k, outs, family, _ = LAUNCHES[name]
    topk = 4 if family == "moe" else 1
    block_m = work_block_m(tokens * topk, slots * experts, rank)
    index = {"dtype": torch.int32}
    work = None if block_m is None else WorkList(meta(tokens * topk, **index), meta(4, **index), 64, block_m)
    ids = meta(tokens, topk, **index) if family == "moe" else None
    routing = Routing(meta(tokens, **index), meta(slots + 1, **index), experts, ids, work=work)
    a = [meta(slots, experts, rank, k)] * len(outs)
    b = [meta(slots, experts, n, rank) for n in outs]
    prefix = f"{name}_" if family == "moe" else ""
    shrink, expand = default_shrink(routing, a, f"{prefix}shrink"), default_expand(routing, b, f"{prefix}expand")
    return block_m, {f"{prefix}shrink": shrink, f"{prefix}expand": expand}


def as_written(point: Any, name: str) -> dict[str, dict[str, Any]]:
    """A point's tiles of a layer, by operation, with the file's fields only."""
    module = LAUNCHES[name][4]
    wanted = {op: row for (of, op), row in point.rows().items() if of == module and (module or op.startswith(name))}
    return {op: row.config.model_dump() for op, row in wanted.items()}


@pytest.mark.parametrize("rank", [16, 32])
@pytest.mark.parametrize("name", LAUNCHES)
def test_an_engine_of_8_slots_gets_the_exact_or_the_nearest_row(name: str, rank: int) -> None:
    start(CONFIG, 8, device=H200, environ={})
    family, exact = LAUNCHES[name][3], set()
    for tokens in SIZES:
        point = expected(family, 8, rank, tokens)
        block_m, found = launched(name, 8, rank, tokens)
        wanted = as_written(point, name)
        assert found.keys() == wanted.keys()
        for op, config in found.items():
            assert wanted[op].items() <= asdict(config).items(), (op, tokens)
            assert listed(config) == block_m
        if point.tokens == tokens and point.rank == rank:
            exact.add(tokens)
    assert exact == {p.tokens for p in getattr(shipped(), family) if (p.adapters, p.rank) == (8, rank)}
    lookups = in_use.report()["operations"][next(iter(found))]["lookups"]
    assert lookups == {"exact": len(exact), "nearest": len(SIZES) - len(exact), "default": 0}


@pytest.mark.parametrize(
    ("slots", "rank", "adapters"),
    [(4, 32, 8), (5, 32, 8), (16, 16, 8), (2, 32, 1), (8, 24, 8), (8, 8, 8),
     (3, 32, None), (17, 32, None), (8, 64, None), (4, 64, None)],
)  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 16, 90, 3000, 8192])
@pytest.mark.parametrize("name", LAUNCHES)
def test_other_slots_and_ranks_get_a_row_within_a_doubling_or_the_defaults(
    name: str, tokens: int, slots: int, rank: int, adapters: int | None
) -> None:
    usual = launched(name, slots, rank, tokens)
    start(CONFIG, slots, device=H200, environ={})
    point = expected(LAUNCHES[name][3], slots, rank, tokens)
    assert (point and point.adapters) == adapters
    found = launched(name, slots, rank, tokens)
    if point is None:
        assert found == usual
    else:
        assert all(w.items() <= asdict(found[1][op]).items() for op, w in as_written(point, name).items())


@pytest.mark.parametrize("tokens", [16385, 65536])
def test_batches_beyond_the_last_point_get_the_defaults(tokens: int) -> None:
    usual = {name: launched(name, 8, 32, tokens) for name in LAUNCHES}
    start(CONFIG, 8, device=H200, environ={})
    assert {name: launched(name, 8, 32, tokens) for name in LAUNCHES} == usual


@pytest.mark.parametrize("gpu", ["NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"])
def test_an_engine_on_another_gpu_gets_the_defaults(gpu: str) -> None:
    places = [(name, tokens) for name in LAUNCHES for tokens in (1, 16, 64, 1024, 8192)]
    usual = [launched(name, 8, 32, tokens) for name, tokens in places]
    found = start(CONFIG, 8, device=Device(gpu, (9, 0), 132, SHARED), environ={})
    assert {op["source"] for op in found["operations"].values()} == {"default"}
    assert found["refused"] == []
    assert [launched(name, 8, 32, tokens) for name, tokens in places] == usual


def fused_launches(rank: int, tokens: int) -> tuple[int | None, dict[str, Config]]:
    """The work list that a fused engine of 8 slots builds, and the tiles that its launchers take."""
    block_m = work_block_m(tokens * 4, 8 * 32, rank)
    index = {"dtype": torch.int32}
    work = None if block_m is None else WorkList(meta(tokens * 4, **index), meta(4, **index), 64, block_m)
    routing = Routing(meta(tokens, **index), meta(9, **index), 32, meta(tokens, 4, **index), work=work)
    last = "expand_topk_sum" if work is None else "down_expand"
    a, gate_up, down = (meta(8, 32, *shape) for shape in ((rank, 2880), (5760, rank), (2880, rank)))
    found: dict[str, Config] = {op: default_shrink(routing, [a], op) for op in ("gate_up_shrink", "down_shrink")}
    found["expand_swiglu"] = default_expand(routing, [gate_up], "expand_swiglu")
    return block_m, found | {last: default_expand(routing, [down], last)}


@pytest.mark.parametrize("rank", [16, 32])
def test_a_fused_engine_gets_the_rows_of_its_own_family(rank: int) -> None:
    start(CONFIG, 8, device=H200, environ={}, fused=True)
    exact = set()
    for tokens in SIZES:
        point = expected("moe_fused", 8, rank, tokens)
        block_m, found = fused_launches(rank, tokens)
        wanted = {op: row.config.model_dump() for (_, op), row in point.rows().items()}
        assert found.keys() == wanted.keys()
        for op, config in found.items():
            assert wanted[op].items() <= asdict(config).items(), (op, tokens)
            assert listed(config) == block_m
        exact |= {tokens} if point.tokens == tokens and point.rank == rank else set()
    assert exact == {2**i for i in range(14)}


@pytest.mark.parametrize("rank", [16, 32])
@pytest.mark.parametrize("tokens", [1024, 8192])
def test_without_rows_of_its_own_a_fused_engine_keeps_default_expands_on_the_tuned_work_list(
    rank: int, tokens: int, tmp_path: Path
) -> None:
    plain = json.loads(GPT_OSS.read_text())
    del plain["moe_fused"]
    plain["runs"] = plain["runs"][:1]
    saved(tmp_path, plain)
    start(CONFIG, 8, device=H200, environ={load.VARIABLE: str(tmp_path)}, fused=True)
    block_m, found = fused_launches(rank, tokens)
    assert block_m == expected("moe", 8, rank, tokens).gate_up_expand.config.block_m
    assert found["expand_swiglu"] == configs.expand_config(tokens * 4, 256, rank, 5760, 1, block_m)
