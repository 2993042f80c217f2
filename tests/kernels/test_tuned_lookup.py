"""Which tiles a launch gets: exact, nearest or default, and always some that it can run."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.tuned_files import GPU, MODULES, document, moe_point, saved

from lorahost_kernels import configs
from lorahost_kernels.configs import ExpandConfig, Launch, ShrinkConfig, work_block_m
from lorahost_kernels.ops.common.defaults import default_expand, default_shrink
from lorahost_kernels.ops.common.routing import Routing, WorkList
from lorahost_kernels.tuned import active as in_use
from lorahost_kernels.tuned import legal, load, schema
from lorahost_kernels.tuned.active import Active
from lorahost_kernels.tuned.shape import KNOWN, ModelShape
from lorahost_kernels.tuned.start import Device, load_table, start
from lorahost_kernels.tuned.table import Table

SHARED = 227 * 1024
H200 = Device(GPU, (9, 0), 132, SHARED)
A10 = Device("NVIDIA A10G", (8, 6), 80, 99 * 1024)
SHAPE = KNOWN["gpt-oss-20b"]
CONFIG = {
    "model_type": "gpt_oss", "num_local_experts": 32, "num_experts_per_tok": 4, "hidden_size": 2880, "head_dim": 64,
    "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 24,
    "vocab_size": 201088,
}  # fmt: skip


@pytest.fixture(autouse=True)
def defaults_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    # once some test has imported vLLM, its loggers' records no longer reach the root logger
    logger = logging.getLogger("vllm.lorahost")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    # nor does pytest's handler keep its level
    caplog.set_level(logging.INFO, logger.name)
    yield
    logger.removeHandler(caplog.handler)
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
        if family == "moe":
            kept = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
            point |= {n: rows[n.rpartition("_")[2]] for n in kept}
        else:
            point["modules"] = dict.fromkeys(draw(st.lists(st.sampled_from([*MODULES]), min_size=1, unique=True)), rows)
        out.append(point)
    return out


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    moe=points("moe"), dense=points("dense"), slots=st.sampled_from([1, 3, 8, 16]), rank=st.integers(1, 256),
    tokens=st.integers(1, 16384), own_list=st.sampled_from(["as asked", None, 16, 32]),
    shared=st.sampled_from([SHARED, 163 * 1024, 99 * 1024]), item=st.sampled_from([2, 4]),
    pad=st.sampled_from([1.0, 1.0667]),
)  # fmt: skip
def test_every_lookup_ends_in_tiles_that_can_run(
    moe: list[dict[str, Any]], dense: list[dict[str, Any]], slots: int, rank: int, tokens: int,
    own_list: Any, shared: int, item: int, pad: float,
) -> None:  # fmt: skip
    file = schema.TunedFile.model_validate(document(moe=moe, dense=dense))
    made = Table(GPU, SHAPE, slots)
    made.add_file(file, "x.json")
    active = in_use.activate(made, shared)
    batches = [
        ("gate_up_shrink", 4, 32, (int(2880 * pad),)), ("gate_up_expand", 4, 32, (int(5760 * pad),)),
        ("down_shrink", 4, 32, (int(2880 * pad),)), ("down_expand", 4, 32, (int(2880 * pad),)),
        ("shrink", 1, 1, (2880,) * 3), ("expand", 1, 1, (4096, 512, 512)), ("shrink", 1, 1, (4096,)),
    ]  # fmt: skip
    for operation, topk, experts, columns in batches:
        pairs, groups = tokens * topk, slots * experts
        block_m = work_block_m(pairs, groups, rank) if own_list == "as asked" else own_list
        launch = Launch(operation, tokens, topk, experts, slots, rank, columns, block_m, item)
        found = active.tiles(launch)
        assert found is active.tiles(launch)
        if found is not None:
            assert isinstance(found, ShrinkConfig if operation.endswith("shrink") else ExpandConfig)
            assert not legal.problem(found, rank, block_m, shared, item)
        else:
            at = (pairs, groups, rank, columns[0], len(columns), block_m)
            default = (configs.shrink_config if operation.endswith("shrink") else configs.expand_config)(*at)
            found = legal.fitted(default, rank, shared, item)
            assert not legal.problem(found, rank, block_m, shared, item)
        assert found.mode == ("pair" if block_m is None else "list")


def variables(folder: Path, **more: str) -> dict[str, str]:
    return {"LORAHOST_CONFIG_DIR": str(folder), **more}


def test_start_finds_the_gpus_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, document())
    saved(tmp_path, document(gpu="NVIDIA A10G"), "NVIDIA_A10G.json")
    caplog.set_level(logging.INFO, "vllm.lorahost")
    found = start(CONFIG, 8, device=H200, environ=variables(tmp_path))
    assert found["gpu"] == GPU
    assert {op: r["source"] for op, r in found["operations"].items()} == dict.fromkeys(found["operations"], "exact")
    assert len(found["operations"]) == 6
    lines = [r.message for r in caplog.records]
    assert len([line for line in lines if line.startswith("lorahost ")]) == 6
    assert "lorahost down_expand: exact, 2 rows, M=16..512, ranks 32 (gpt-oss-20b.json)" in lines
    json.dumps(found)


def test_another_gpu_takes_no_rows_and_says_its_class(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, document())
    caplog.set_level(logging.INFO, "vllm.lorahost")
    found = start(CONFIG, 8, device=A10, environ=variables(tmp_path))
    assert {r["source"] for r in found["operations"].values()} == {"default"}
    line = "defaults (sm_86, no PDL, programs for 80 multiprocessors, 99 KiB shared), no rows for NVIDIA A10G"
    assert any(line in r.message for r in caplog.records)


def test_a_bad_file_is_refused_aloud_and_the_rest_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, document())
    saved(tmp_path, document(note=1), "NVIDIA_H200/a.json")
    saved(tmp_path, document(gpu="NVIDIA H100"), "NVIDIA_H200/b.json")
    found = start(CONFIG, 8, device=H200, environ=variables(tmp_path))
    assert len(found["refused"]) == 2
    assert "note: Extra inputs" in found["refused"][0]
    assert "gpu is 'NVIDIA H100'" in found["refused"][1]
    assert [r.levelname for r in caplog.records if "refused" in r.message] == ["ERROR", "ERROR"]
    assert found["operations"]["shrink"]["source"] == "exact"


def test_an_unknown_model_or_folder_starts_with_the_defaults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert start({"model_type": "bert"}, 8, device=H200, environ={}) == {"active": False, "operations": {}}
    assert "model_type 'bert' is none of" in caplog.text
    found = start(CONFIG, 8, device=H200, environ=variables(tmp_path / "none"))
    assert "none is no directory" in found["refused"][0]
    assert configs.chooser() is not None


def test_other_models_files_are_passed_over(tmp_path: Path) -> None:
    saved(tmp_path, document())
    made, _ = load_table(H200, KNOWN["gpt-oss-120b"], 8, variables(tmp_path))
    assert not made.families["moe"].points
    # attention has the same sizes
    assert made.families["dense"].points


def test_without_the_variable_the_package_or_the_checkout_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load.folder({"LORAHOST_CONFIG_DIR": "/x"}) == Path("/x")
    assert load.folder({}) == Path(__file__).parents[2] / "tuned_configs"
    # in a wheel the folder is inside the package
    site = tmp_path / "lorahost_kernels"
    (site / "tuned_configs").mkdir(parents=True)
    monkeypatch.setattr(load, "__file__", str(site / "tuned" / "load.py"))
    assert load.folder({}) == site / "tuned_configs"
    (site / "tuned_configs").rmdir()
    assert load.folder({}) is None
    assert load.gpu_key("NVIDIA H100 80GB HBM3") == "NVIDIA_H100_80GB_HBM3"
    assert load.gpu_key("NVIDIA A100-SXM4-80GB") == "NVIDIA_A100_SXM4_80GB"


def test_importing_reads_nothing_and_needs_no_torch() -> None:
    code = "import os\nos.environ['LORAHOST_CONFIG_DIR'] = '/none'\nimport lorahost_kernels.tuned.active as t, sys\n"
    code += "assert t.report() == {'active': False, 'operations': {}}\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_kernels_alone_need_no_pydantic() -> None:
    code = "import sys\nsys.modules['pydantic'] = None\nimport lorahost_kernels.ops.layer, lorahost_kernels.self_check"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_caches_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorahost_kernels.tuned.active.MAX_CACHED", 10)
    active = Active(table(tmp_path), SHARED)
    for tokens in range(1, 60):
        active.tiles(moe_launch("down_shrink", tokens, None))
        active.block_m(4 * tokens, 256, 32)
    assert max(len(active._tiles), len(active._blocks)) <= 10
