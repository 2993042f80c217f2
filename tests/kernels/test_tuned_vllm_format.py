"""vLLM's own tuned files: the same names and nesting, converted and checked; a bad one never stops an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.test_tuned_lookup import moe_launch
from tests.kernels.tuned_engine import CONFIG, H200
from tests.kernels.tuned_files import GPU, document, moe_point, saved

from lorahost_kernels.configs import ExpandConfig, Launch, ShrinkConfig, chooser, default_block_m, work_block_m
from lorahost_kernels.tuned import active as in_use
from lorahost_kernels.tuned import legal, vllm_format
from lorahost_kernels.tuned.shape import KNOWN
from lorahost_kernels.tuned.start import start
from lorahost_kernels.tuned.table import Table

SHAPE = KNOWN["gpt-oss-20b"]
QWEN = KNOWN["qwen3-30b-a3b"]
LEAF = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 4, "NUM_WARPS": 8,
        "NUM_STAGES": 4, "SPLIT_K": 2}  # fmt: skip
LOWER = {"block_m": 32, "block_n": 64, "block_k": 128, "num_warps": 8, "num_stages": 4, "num_ctas": 1}
# file -> (slices, sizes below the tokens: k, n and for experts the intermediate size)
GPT_OSS: dict[str, tuple[int, list[int]]] = {
    "FUSED_MOE_LORA_W13_SHRINK": (1, [32, 3072, 5888]),
    "FUSED_MOE_LORA_W13_EXPAND": (1, [32, 3072, 5888]),
    "FUSED_MOE_LORA_W2_SHRINK": (1, [32, 3072, 2944]),
    "FUSED_MOE_LORA_W2_EXPAND": (1, [32, 3072, 2944]),
}


def nested(keys: list[int], leaf: Any) -> Any:
    for key in reversed(keys):
        leaf = {str(key): leaf}
    return leaf


def put(folder: Path, name: str, content: Any) -> Path:
    return saved(folder, content, f"NVIDIA_H200_{name}.json")


def moe_files(folder: Path, leaf: Any = LEAF, slots: int = 8, tokens: int = 512, **other: Any) -> None:
    for name, (slices, sizes) in GPT_OSS.items():
        put(folder, name, nested([slots, slices, tokens, *sizes], other.get(name, leaf)))


def loaded(folder: Path, shape: Any = SHAPE, slots: int = 8) -> tuple[Table, list[str]]:
    table = Table(GPU, shape, slots)
    return table, vllm_format.add(table, str(folder))


@pytest.fixture(autouse=True)
def defaults_again() -> Any:
    yield
    in_use.deactivate()


def test_moe_files_become_rows_of_mode_list(tmp_path: Path) -> None:
    moe_files(tmp_path)
    table, wrong = loaded(tmp_path)
    assert wrong == []
    [point] = table.families["moe"].points.values()
    assert (point.adapters, point.rank, point.tokens, point.block_m) == (8, 32, 512, 32)
    active = in_use.activate(table)
    assert work_block_m(512 * 4, 256, 32) == 32
    shrink = active.tiles(moe_launch("gate_up_shrink", 512, 32, columns=(3072,)))
    assert shrink == ShrinkConfig("list", 32, 128, 2, 0, 8, 4)
    expand = active.tiles(moe_launch("down_expand", 512, 32, columns=(3072,)))
    assert isinstance(expand, ExpandConfig)
    assert (expand.block_n, expand.num_warps, expand.num_stages, expand.group) == (64, 8, 4, 4)
    source = in_use.report()["operations"]["down_expand"]
    assert source["files"] == ["VLLM_TUNED_CONFIG_FOLDER, 4 operations"]


def test_lower_case_names_and_a_model_with_two_slices(tmp_path: Path) -> None:
    for name in GPT_OSS:
        slices = 2 if "W13" in name else 1
        put(tmp_path, name, nested([8, slices, 2048, 32, 2048, 768], LOWER | {"split_k": 4}))
    table, wrong = loaded(tmp_path, QWEN)
    assert wrong == []
    [point] = table.families["moe"].points.values()
    assert len(point.rows) == 4
    assert ("gate_up_expand", (768, 768)) in point.rows


def test_dense_files_count_the_base_model_as_an_adapter(tmp_path: Path) -> None:
    put(tmp_path, "SHRINK", nested([9, 3, 256, 2880, 32], LOWER | {"split_k": 64}))
    put(tmp_path, "EXPAND_TRUE", nested([9, 3, 256, 32, 4096], LOWER | {"block_m": 128}))
    table, wrong = loaded(tmp_path)
    assert wrong == []
    [point] = table.families["dense"].points.values()
    assert point.adapters == 8
    # vLLM's dense kernels group for themselves: where their files disagree the default's list is built
    assert point.block_m == default_block_m(256, 8, 32)
    shrink = point.rows["shrink", (2880,) * 3]
    assert isinstance(shrink, ShrinkConfig)
    assert shrink.split_k <= 8
    assert set(point.rows) == {("shrink", (2880,) * 3), ("expand", (4096, 512, 512))}


def test_64_rows_a_tile_get_warps_that_are_safe(tmp_path: Path) -> None:
    moe_files(tmp_path, LEAF | {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 32}, tokens=8192)
    table, wrong = loaded(tmp_path)
    assert wrong == []
    [point] = table.families["moe"].points.values()
    assert point.block_m == 64
    assert not any(legal.problem(c, 32, 64, 227 * 1024) for c in point.rows.values())


def test_keys_that_are_missing(tmp_path: Path) -> None:
    """vLLM's MoE kernels need none: the defaults fill in; its dense kernels need all but the group size."""
    moe_files(tmp_path, {"NUM_WARPS": 2})
    put(tmp_path, "SHRINK", nested([9, 3, 256, 2880, 32], LOWER))
    put(tmp_path, "EXPAND_TRUE", nested([9, 3, 256, 32, 4096], {k: v for k, v in LOWER.items() if k != "block_n"}))
    table, wrong = loaded(tmp_path)
    [point] = table.families["moe"].points.values()
    assert point.block_m == default_block_m(2048, 256, 32)
    assert {c.num_warps for c in point.rows.values()} == {2}
    assert wrong == [
        f"{tmp_path}/NVIDIA_H200_SHRINK.json: 9.3.256.2880.32: SPLIT_K is missing",
        f"{tmp_path}/NVIDIA_H200_EXPAND_TRUE.json: 9.3.256.32.4096: BLOCK_SIZE_N is missing",
    ]
    assert not table.families["dense"].points


def test_a_level_that_is_missing_is_named(tmp_path: Path) -> None:
    """Without the level of num_slices stock vLLM raises in the middle of a step."""
    put(tmp_path, "FUSED_MOE_LORA_W13_SHRINK", nested([8, 512, 32, 3072, 5888], LEAF))
    table, wrong = loaded(tmp_path)
    assert not table.families["moe"].points
    path = tmp_path / "NVIDIA_H200_FUSED_MOE_LORA_W13_SHRINK.json"
    assert wrong == [
        f"{path}: 8.512.32.3072.5888: 'BLOCK_SIZE_M' is there where numbers are expected, 1 levels are missing"
    ]


def test_w13_and_w2_that_disagree_are_not_used(tmp_path: Path) -> None:
    """Stock vLLM would give silently wrong output."""
    moe_files(tmp_path, FUSED_MOE_LORA_W2_SHRINK=LEAF | {"BLOCK_SIZE_M": 64})
    table, wrong = loaded(tmp_path)
    assert not table.families["moe"].points
    [text] = wrong
    assert "BLOCK_SIZE_M must be one in the files of W13 and W2" in text
    assert "64 in" in text
    assert "W2_SHRINK.json: 8.1.512.32.3072.2944" in text


def test_small_batches_keep_the_defaults(tmp_path: Path) -> None:
    moe_files(tmp_path, tokens=4)
    table, wrong = loaded(tmp_path)
    assert not table.families["moe"].points
    assert wrong == [f"{tmp_path}: 1 points are of batches that need no work list here, and keep the defaults"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"BLOCK_SIZE_M": 48}, "BLOCK_SIZE_M=48 is no power of two"),
        ({"BLOCK_SIZE_K": 0}, "BLOCK_SIZE_K=0 is no whole number from 16 to 512"),
        ({"NUM_WARPS": "4"}, "NUM_WARPS='4' is no whole number"),
        ({"NUM_STAGES": True}, "NUM_STAGES=True is no whole number"),
        ({"SPLIT_K": 1e9}, "SPLIT_K=1000000000.0 is no whole number"),
        ({"kpack": 2}, "unknown key 'kpack'"),
    ],
    ids=str,
)  # fmt: skip
def test_values_that_are_impossible(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    moe_files(tmp_path, FUSED_MOE_LORA_W13_SHRINK=LEAF | change)
    table, wrong = loaded(tmp_path)
    assert len(wrong) == 1
    assert f"{tmp_path}/NVIDIA_H200_FUSED_MOE_LORA_W13_SHRINK.json: 8.1.512.32.3072.5888: {message}" in wrong[0]
    [point] = table.families["moe"].points.values()
    assert len(point.rows) == 3


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"8": 1}', '{"8": {"1": {"x": {}}}}', '{"8": {}, "8": {}}', "[" * 100000]
)
def test_files_that_are_no_files(tmp_path: Path, text: str) -> None:
    moe_files(tmp_path)
    path = put(tmp_path, "FUSED_MOE_LORA_W13_SHRINK", text)
    table, wrong = loaded(tmp_path)
    assert any(str(path) in w for w in wrong)
    [point] = table.families["moe"].points.values()
    assert len(point.rows) == 3


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.sampled_from([8, 32, 16, "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["8", "1", "512", "32", "3072", "5888", "x", "-1", *LEAF]), inner, max_size=3)
    ),
    max_leaves=30,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(JSON, min_size=6, max_size=6), st.dictionaries(st.sampled_from([*LEAF]), st.integers(-1, 600)))
def test_no_content_stops_an_engine_or_makes_illegal_tiles(
    tmp_path_factory: pytest.TempPathFactory, contents: list[Any], leaf: dict[str, int]
) -> None:
    folder = tmp_path_factory.mktemp("vllm")
    for name, content in zip(vllm_format.FILES, contents, strict=True):
        put(folder, name, content)
    put(folder, "FUSED_MOE_LORA_W2_EXPAND", nested([8, 1, 512, 32, 3072, 2944], LEAF | leaf))
    start(CONFIG, 8, device=H200, environ={"VLLM_TUNED_CONFIG_FOLDER": str(folder), "LORAHOST_CONFIG_DIR": str(folder)})
    choose = chooser()
    assert choose is not None
    for tokens in (1, 16, 512, 8192):
        block_m = work_block_m(tokens * 4, 256, 32)
        for operation, columns in (("gate_up_shrink", (3072,)), ("down_expand", (3072,))):
            found = choose.tiles(Launch(operation, tokens, 4, 32, 8, 32, columns, block_m, 2))
            assert found is None or not legal.problem(found, 32, block_m, H200.shared_limit)


def test_our_own_points_come_first(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    saved(ours, document(moe=[moe_point(8, 32, 512, 16)]))
    moe_files(theirs)
    moe_files(tmp_path / "both", tokens=2048)
    environ = {"LORAHOST_CONFIG_DIR": str(ours), "VLLM_TUNED_CONFIG_FOLDER": str(theirs)}
    start(CONFIG, 8, device=H200, environ=environ)
    assert work_block_m(2048, 256, 32) == 16
    found = start(CONFIG, 8, device=H200, environ={**environ, "LORAHOST_CONFIG_DIR": str(tmp_path / "none")})
    assert work_block_m(2048, 256, 32) == 32
    assert found["vllm_folder"] == str(theirs)
    found = start(CONFIG, 8, device=H200, environ={**environ, "VLLM_TUNED_CONFIG_FOLDER": str(tmp_path / "no")})
    assert found["vllm_warnings"] == [f"VLLM_TUNED_CONFIG_FOLDER={tmp_path / 'no'} is no directory"]
    json.dumps(found)
