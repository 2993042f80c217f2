"""Which tiles a launch gets: exact, nearest or default, and always some that it can run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.tuned_engine import SHARED
from tests.kernels.tuned_files import GPU, MODULES, document, fused_document, fused_point, moe_point, saved

from lorahost_kernels import configs
from lorahost_kernels.configs import ExpandConfig, Launch, ShrinkConfig, work_block_m
from lorahost_kernels.ops.common.defaults import default_expand, default_shrink
from lorahost_kernels.ops.common.routing import Routing, WorkList
from lorahost_kernels.tuned import active as in_use
from lorahost_kernels.tuned import legal, schema
from lorahost_kernels.tuned.active import Active
from lorahost_kernels.tuned.shape import KNOWN, ModelShape
from lorahost_kernels.tuned.table import Table

SHAPE = KNOWN["gpt-oss-20b"]


@pytest.fixture(autouse=True)
def defaults_again() -> Iterator[None]:
    yield
    in_use.deactivate()


def table(tmp_path: Path, shape: ModelShape = SHAPE, slots: int = 8, **changes: Any) -> Table:
    made = Table(GPU, shape, slots)
    made.add_file(schema.read(saved(tmp_path, document(**changes))), "x.json")
    return made


def moe_launch(op: str, tokens: int, rows: int | None, **changes: Any) -> Launch:
    columns = (5760,) if op == "gate_up_expand" else (2880,)
    return Launch(op, tokens, 4, 32, 8, 32, columns, rows, 2)._replace(**changes)


def test_exact_nearest_default(tmp_path: Path) -> None:
    active = in_use.activate(table(tmp_path))
    exact = active.tiles(moe_launch("gate_up_shrink", 16, None))
    assert exact == ShrinkConfig("pair", 16, 1024, 1, 2, 4)
    assert active.tiles(moe_launch("gate_up_shrink", 24, None)) == exact
    assert active.tiles(moe_launch("gate_up_shrink", 33, None)) is None
    found = in_use.report()["operations"]["gate_up_shrink"]
    assert found["lookups"] == {"exact": 1, "nearest": 1, "default": 1}
    assert (found["source"], found["rows"], found["tokens"], found["files"]) == ("exact", 2, [16, 512], ["x.json"])
    active.tiles(moe_launch("gate_up_shrink", 24, None))
    assert in_use.report()["operations"]["gate_up_shrink"]["lookups"]["nearest"] == 1, "cached"


@pytest.mark.parametrize(
    ("tokens", "slots", "found"),
    [(8, 8, True), (32, 8, True), (7, 8, False), (16, 4, True), (16, 16, True), (16, 3, False), (16, 17, False)],
)
def test_how_far_the_nearest_may_be(tmp_path: Path, tokens: int, slots: int, found: bool) -> None:
    active = in_use.activate(table(tmp_path, slots=slots))
    assert (active.tiles(moe_launch("down_expand", tokens, None, slots=slots)) is not None) == found


def test_the_nearer_and_on_a_tie_the_larger_batch_wins(tmp_path: Path) -> None:
    points = [moe_point(8, 32, m, block_m) for m, block_m in ((64, 16), (128, 32), (256, 64))]
    active = in_use.activate(table(tmp_path, moe=points))
    assert [active.block_m(4 * m, 256, 32) for m in (64, 90, 91, 180, 182, 512)] == [16, 16, 32, 32, 64, 64]
    points = [moe_point(8, 32, 64, 16), moe_point(8, 32, 256, 64)]
    assert in_use.activate(table(tmp_path, moe=points)).block_m(4 * 128, 256, 32) == 64


def test_ranks_are_one_after_padding(tmp_path: Path) -> None:
    active = in_use.activate(table(tmp_path))
    assert active.tiles(moe_launch("down_expand", 16, None, rank=24)) is not None
    assert active.tiles(moe_launch("down_expand", 16, None, rank=16)) is None
    assert active.tiles(moe_launch("down_expand", 16, None, rank=64)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"experts": 128}, {"topk": 8}, {"slots": 4}, {"columns": (2048,)}, {"columns": (2880, 2880)},
        {"operation": "router_shrink"}, {"operation": "shrink"}, {"block_m": 16}, {"item": 4, "block_m": 64},
    ],
    ids=str,
)  # fmt: skip
def test_another_family_gets_no_row(tmp_path: Path, changes: dict[str, Any]) -> None:
    active = in_use.activate(table(tmp_path))
    assert active.tiles(moe_launch("down_expand", 16, None, **changes)) is None


def test_padded_experts_are_near(tmp_path: Path) -> None:
    active = in_use.activate(table(tmp_path))
    for columns in ((3072,), (2944,)):
        assert active.tiles(moe_launch("down_shrink", 16, None, columns=columns)) is not None
    assert in_use.report()["operations"]["down_shrink"]["lookups"] == {"exact": 0, "nearest": 2, "default": 0}


def test_dense_sizes_must_be_equal(tmp_path: Path) -> None:
    active = in_use.activate(table(tmp_path))
    launch = Launch("expand", 16, 1, 1, 8, 32, (4096, 512, 512), None, 2)
    assert active.tiles(launch) == ExpandConfig("pair", 16, 64, 2, 4)
    assert active.tiles(launch._replace(columns=(4096, 512, 576))) is None
    assert active.tiles(launch._replace(operation="shrink", columns=(2880,) * 3)) is not None
    assert active.tiles(launch._replace(operation="shrink", columns=(2880,))) is None


def test_the_work_list_and_the_rows_agree(tmp_path: Path) -> None:
    in_use.activate(table(tmp_path))
    assert work_block_m(512 * 4, 8 * 32, 32) == 32
    assert work_block_m(512, 8, 32) == 64
    assert work_block_m(16 * 4, 8 * 32, 32) is None
    # no point: the default's answer
    assert work_block_m(4096 * 4, 8 * 32, 32) == configs.default_block_m(4096 * 4, 8 * 32, 32)
    # not this model's experts
    assert work_block_m(512 * 4, 8 * 64, 32) == configs.default_block_m(512 * 4, 8 * 64, 32)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_launchers_ask_the_table(tmp_path: Path) -> None:
    index = {"dtype": torch.int32}
    routing = Routing(meta(16, **index), meta(9, **index), 32, meta(16, 4, **index))
    a, b = [meta(8, 32, 32, 2880)], [meta(8, 32, 2880, 32)]
    usual = default_expand(routing, b, "down_expand")
    assert usual != ExpandConfig("pair", 16, 64, 2, 4)
    in_use.activate(table(tmp_path))
    assert default_expand(routing, b, "down_expand") == ExpandConfig("pair", 16, 64, 2, 4)
    assert default_expand(routing, b) == usual, "who does not say which operation it is gets the default"
    listed = WorkList(meta(64, **index), meta(4, **index), 64, 16)
    assert default_shrink(Routing(*[getattr(routing, n) for n in ("token_slots", "adapter_enabled", "num_experts")],
                                  routing.topk_ids, None, work=listed), a, "down_shrink").mode == "list"  # fmt: skip
    in_use.deactivate()
    assert default_expand(routing, b, "down_expand") == usual
    assert in_use.report() == {"active": False, "operations": {}}


TILES_SHRINK = st.fixed_dictionaries(
    {"block_k": st.sampled_from([16, 64, 256, 512]), "split_k": st.integers(1, 32),
     "num_warps": st.sampled_from([1, 2, 4, 8, 16])}
)  # fmt: skip
TILES_EXPAND = st.fixed_dictionaries(
    {"block_n": st.sampled_from([16, 64, 512]), "steps": st.integers(1, 64), "num_warps": st.sampled_from([1, 2])}
)


@st.composite
def points(draw: st.DrawFn, family: str) -> list[dict[str, Any]]:
    """Points of any good file, some of them without some operations."""
    out = []
    places = st.tuples(st.sampled_from([1, 2, 8, 16]), st.sampled_from([8, 16, 32, 64, 256]), st.integers(1, 9000))
    for adapters, rank, tokens in draw(st.lists(places, max_size=6, unique=True)):
        block_m = draw(st.sampled_from([None, 16, 32, 64]))
        extra: dict[str, Any] = {"mode": "pair"}
        if block_m is not None:
            extra = {"mode": "list", "block_m": block_m, "num_stages": draw(st.integers(1, 8))}
        shrink = draw(TILES_SHRINK) | extra | ({} if block_m else {"ranks": draw(st.sampled_from([1, 4, 16]))})
        expand = draw(TILES_EXPAND) | extra
        times = {"before_us": 2.0, "after_us": 1.0}
        rows = {"shrink": {"config": shrink, **times}, "expand": {"config": expand, **times}}
        point: dict[str, Any] = {"run": 0, "adapters": adapters, "rank": rank, "tokens": tokens, **times}
        names = ["gate_up_shrink", "gate_up_expand", "down_shrink", "down_expand"]
        if family == "moe_fused":
            rows |= {"expand_swiglu": rows["expand"], "down_expand": rows["expand"]}
            if block_m is None:
                # with ranks up to 16 the largest one is within the limit of expand_topk_sum
                widths = st.sampled_from([16, 64, 128] if rank <= 16 else [16])
                config = {"mode": "pair", "block_n": draw(widths), "num_warps": draw(st.sampled_from([1, 2]))}
                rows["expand_swiglu"] = rows["expand_topk_sum"] = {"config": config, **times}
            last = "down_expand" if block_m else "expand_topk_sum"
            names = ["gate_up_shrink", "expand_swiglu", "down_shrink", last]
            kept = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
            point |= {n: rows.get(n) or rows["shrink"] for n in kept}
        elif family == "moe":
            kept = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
            point |= {n: rows[n.rpartition("_")[2]] for n in kept}
        else:
            point["modules"] = dict.fromkeys(draw(st.lists(st.sampled_from([*MODULES]), min_size=1, unique=True)), rows)
        out.append(point)
    return out


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    moe=points("moe"), moe_fused=points("moe_fused"), dense=points("dense"), fused=st.booleans(),
    slots=st.sampled_from([1, 3, 8, 16]), rank=st.integers(1, 256),
    tokens=st.integers(1, 16384), own_list=st.sampled_from(["as asked", None, 16, 32]),
    shared=st.sampled_from([SHARED, 163 * 1024, 99 * 1024]), item=st.sampled_from([2, 4]),
    pad=st.sampled_from([1.0, 1.0667]),
)  # fmt: skip
def test_every_lookup_ends_in_tiles_that_can_run(
    moe: list[dict[str, Any]], moe_fused: list[dict[str, Any]], dense: list[dict[str, Any]], fused: bool, slots: int,
    rank: int, tokens: int, own_list: Any, shared: int, item: int, pad: float,
) -> None:  # fmt: skip
    file = schema.TunedFile.model_validate(document(moe=moe, moe_fused=moe_fused, dense=dense))
    made = Table(GPU, SHAPE, slots, fused)
    made.add_file(file, "x.json")
    active = in_use.activate(made, shared)
    batches = [
        ("gate_up_shrink", 4, 32, (int(2880 * pad),)), ("gate_up_expand", 4, 32, (int(5760 * pad),)),
        ("down_shrink", 4, 32, (int(2880 * pad),)), ("down_expand", 4, 32, (int(2880 * pad),)),
        ("expand_swiglu", 4, 32, (int(5760 * pad),)), ("expand_topk_sum", 4, 32, (int(2880 * pad),)),
        ("shrink", 1, 1, (2880,) * 3), ("expand", 1, 1, (4096, 512, 512)), ("shrink", 1, 1, (4096,)),
    ]  # fmt: skip
    for operation, topk, experts, columns in batches:
        pairs, groups = tokens * topk, slots * experts
        block_m = work_block_m(pairs, groups, rank) if own_list == "as asked" else own_list
        launch = Launch(operation, tokens, topk, experts, slots, rank, columns, block_m, item)
        if operation == "expand_topk_sum" and block_m is not None:
            assert active.tiles(launch) is None
            continue
        found = active.tiles(launch)
        assert found is active.tiles(launch)
        if found is not None:
            assert made.experts == "moe_fused" or operation not in ("expand_swiglu", "expand_topk_sum")
            if operation == "expand_topk_sum":
                assert not legal.topk_sum_problem(found, topk, rank)
            assert isinstance(found, ShrinkConfig if operation.endswith("shrink") else ExpandConfig)
            assert not legal.problem(found, rank, block_m, shared, item)
        else:
            at = (pairs, groups, rank, columns[0], len(columns), block_m)
            default = (configs.shrink_config if operation.endswith("shrink") else configs.expand_config)(*at)
            found = legal.fitted(default, rank, shared, item)
            assert not legal.problem(found, rank, block_m, shared, item)
        assert found.mode == ("pair" if block_m is None else "list")


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_engine_takes_fused_rows_and_no_other_does(tmp_path: Path, fused: bool) -> None:
    made = Table(GPU, SHAPE, 8, fused)
    made.add_file(schema.read(saved(tmp_path, fused_document())), "x.json")
    active = in_use.activate(made)
    # at 512 tokens the plain rows share tiles of 32 rows, the fused ones of 16
    assert work_block_m(512 * 4, 8 * 32, 32) == (16 if fused else 32)
    swiglu = moe_launch("expand_swiglu", 512, 16, columns=(5760,))
    assert (active.tiles(swiglu) is not None) == fused
    assert (active.tiles(swiglu._replace(tokens=16, block_m=None)) is not None) == fused
    assert active.tiles(moe_launch("gate_up_expand", 16, None)) == (
        None if fused else ExpandConfig("pair", 16, 64, 2, 4)
    )
    summed = active.tiles(moe_launch("expand_topk_sum", 16, None))
    assert summed == (ExpandConfig("pair", 16, 32, 1, 2) if fused else None)
    report = in_use.report()
    assert report["fused"] == fused
    families = {op: has["family"] for op, has in report["operations"].items()}
    assert families == made.operations()
    assert set(families.values()) == {"moe_fused" if fused else "moe", "dense"}
    assert ("expand_swiglu" in families, "gate_up_expand" in families) == (fused, not fused)


def test_a_fused_engine_without_fused_rows_takes_the_plain_ones(tmp_path: Path) -> None:
    made = Table(GPU, SHAPE, 8, True)
    made.add_file(schema.read(saved(tmp_path, document())), "x.json")
    active = in_use.activate(made)
    assert work_block_m(512 * 4, 8 * 32, 32) == 32
    for operation in ("gate_up_shrink", "down_shrink", "down_expand"):
        assert active.tiles(moe_launch(operation, 512, 32)) is not None
    assert active.tiles(moe_launch("expand_swiglu", 512, 32, columns=(5760,))) is None
    assert active.tiles(moe_launch("expand_topk_sum", 16, None)) is None
    sources = {op: (has["family"], has["source"]) for op, has in in_use.report()["operations"].items()}
    assert sources == {
        "gate_up_shrink": ("moe", "exact"), "expand_swiglu": ("moe", "default"), "down_shrink": ("moe", "exact"),
        "expand_topk_sum": ("moe", "default"), "down_expand": ("moe", "exact"), "shrink": ("dense", "exact"),
        "expand": ("dense", "exact"),
    }  # fmt: skip


def test_the_sum_over_experts_of_a_larger_rank_keeps_its_limit(tmp_path: Path) -> None:
    """Rank 24 is served by rank 32's row and pads to as many; the limit is that of the launch."""
    made = Table(GPU, SHAPE, 8, True)
    made.add_file(schema.read(saved(tmp_path, fused_document(moe_fused=[fused_point(8, 32, 16, None)]))), "x.json")
    active = in_use.activate(made)
    assert active.tiles(moe_launch("expand_topk_sum", 16, None, rank=24)) is not None
    assert active.tiles(moe_launch("expand_topk_sum", 16, None, rank=64)) is None
    assert active.tiles(moe_launch("expand_topk_sum", 16, 16)) is None


def test_caches_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorahost_kernels.tuned.active.MAX_CACHED", 10)
    active = Active(table(tmp_path), SHARED)
    for tokens in range(1, 60):
        active.tiles(moe_launch("down_shrink", tokens, None))
        active.block_m(4 * tokens, 256, 32)
    assert max(len(active._tiles), len(active._blocks)) <= 10
