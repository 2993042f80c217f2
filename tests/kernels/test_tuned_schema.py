"""What a tuned configuration file may hold; every refusal names the line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.tuned_files import (
    PAIR_EXPAND,
    PAIR_FUSED,
    document,
    fused_document,
    fused_point,
    list_expand,
    moe_point,
    row,
    saved,
)

from lorahost_kernels.tune.writer import tiles_json
from lorahost_kernels.tuned.lines import ConfigError, line_of, parse
from lorahost_kernels.tuned.schema import read
from lorahost_kernels.tuned.tiles import tiles


def config(d: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = d["moe"][0]["gate_up_shrink"]["config"]
    return found


def test_a_good_file_is_read(tmp_path: Path) -> None:
    file = read(saved(tmp_path, document()))
    assert [p.tokens for p in file.moe] == [16, 512]
    rows = file.moe[1].rows()
    assert len(rows) == 4
    assert tiles(rows["", "down_shrink"].config).block_m == 32
    assert len(file.dense[0].rows()) == 4


def test_a_point_may_lack_operations(tmp_path: Path) -> None:
    content = document()
    del content["moe"][0]["down_expand"], content["dense"][0]["modules"]["o"]["expand"]
    file = read(saved(tmp_path, content))
    assert (len(file.moe[0].rows()), len(file.dense[0].rows())) == (3, 3)


def test_switches_are_read_and_written_where_they_differ(tmp_path: Path) -> None:
    content = document()
    switched: dict[str, Any] = {"masks": True, "specialize": True, "pdl": False, "fused_add": False}
    for point in content["moe"]:
        point["gate_up_expand"]["config"].update(switched)
    for point in read(saved(tmp_path, content)).moe:
        rows = point.rows()
        assert vars(tiles(rows["", "gate_up_expand"].config)).items() >= switched.items()
        assert tiles_json("gate_up_expand", tiles(rows["", "gate_up_expand"].config)).items() >= switched.items()
        assert not tiles_json("down_expand", tiles(rows["", "down_expand"].config)).keys() & switched.keys()


# what is changed, what the message says, what the named line holds
REFUSED: list[tuple[Callable[[dict[str, Any]], object], str, str]] = [
    (lambda d: d.update(note="x"), "note: Extra inputs", '"note"'),
    (lambda d: d.update(format=2), "format: Input should be 1", '"format"'),
    (lambda d: config(d).update(block_q=1), "block_q: Extra inputs", '"block_q"'),
    (lambda d: config(d).update(block_m=16), "block_m: Extra inputs", '"block_m"'),
    (lambda d: config(d).update(block_k=1000), "must be a power of two, got 1000", '"block_k"'),
    (lambda d: config(d).update(block_k=2**20), "less than or equal to 16384", '"block_k"'),
    (lambda d: config(d).update(num_warps=0), "greater than or equal to 1", '"num_warps"'),
    (lambda d: config(d).update(num_warps="4"), "valid integer, got '4'", '"num_warps"'),
    (lambda d: config(d).update(num_warps=True), "valid integer, got True", '"num_warps"'),
    (lambda d: config(d).update(split_k=1.0), "valid integer, got 1.0", '"split_k"'),
    (lambda d: config(d).update(mode="auto"), "'auto' found using 'mode' does not match", '"config"'),
    (lambda d: config(d).pop("ranks"), "ranks: Field required", '"config"'),
    (lambda d: d["moe"][0].update(fused=row({})), "fused: Extra inputs", '"fused"'),
    (lambda d: d["moe"][0].update(tokens=0), "tokens: Input should be greater", '"tokens"'),
    (lambda d: d["moe"][0].update(before_us=float("nan")), "before_us: Input should be a finite", '"before_us"'),
    (lambda d: d["moe"][1].update(after_us=9.5), "after_us=9.5 is slower than before_us=9.0", "{"),
    (lambda d: d["moe"].append(d["moe"][0]), "adapters=8, rank=32, tokens=16 is there twice", "{"),
    (lambda d: d["dense"][0].update(run=3), "run=3, but there are 1 runs", '"run"'),
    (lambda d: d["dense"][0]["modules"].update(up={}), "no module 'up' in the file's modules", '"up"'),
    (lambda d: d["runs"][0].pop("triton"), "triton: Field required", "{"),
    (lambda d: d["runs"][0].update(date="2026-13-01"), "month must be in 1..12", "{"),
    (lambda d: d["experts"].update(slices=3), "slices: Input should be 1 or 2", '"slices"'),
    (lambda d: d.pop("experts"), "moe points need experts", "{"),
    (
        lambda d: d["moe"][1].update(down_expand=row(list_expand(16))),
        "must agree on mode and block_m: gate_up_shrink: list 32; gate_up_expand: list 32; down_shrink: list 32; "
        "down_expand: list 16",
        "{",
    ),
    (lambda d: d["moe"].append(moe_point(8, 32, 64, 128)), "Input should be 16, 32 or 64, got 128", '"block_m"'),
]  # fmt: skip


FUSED_REFUSED: list[tuple[Callable[[dict[str, Any]], object], str, str]] = [
    (lambda d: d["moe_fused"][0].update(gate_up_expand=row(PAIR_EXPAND)), "gate_up_expand: Extra inputs",
     '"gate_up_expand"'),
    (lambda d: d["moe"][0].update(expand_swiglu=row(PAIR_FUSED)), "expand_swiglu: Extra inputs", '"expand_swiglu"'),
    (lambda d: d["moe_fused"][0]["expand_swiglu"]["config"].update(steps=2), "steps: Extra inputs", '"steps"'),
    (lambda d: d["moe_fused"][0]["expand_swiglu"]["config"].update(fused_add=False), "fused_add: Extra", '"fused_add"'),
    (lambda d: d["moe_fused"][1]["expand_swiglu"]["config"].update(fused_add=False), "fused_add: Extra", '"fused_add"'),
    (lambda d: d["moe_fused"][0].update(down_expand=row(PAIR_EXPAND)),
     "down_expand.config.mode: Input should be 'list'", '"mode"'),
    (lambda d: d["moe_fused"][1].update(expand_topk_sum=row(PAIR_FUSED)), "must agree on mode and block_m", "{"),
    (lambda d: d["moe_fused"][0]["expand_topk_sum"]["config"].update(block_n=128),
     "block_n=128 for 4 experts a token holds 16384 elements of 8192 at once", '"expand_topk_sum"'),
    (lambda d: d["moe_fused"].append(fused_point(8, 32, 16, 32)), "tokens=16 is there twice", "{"),
    (lambda d: d["moe_fused"][0].update(run=1), "run=1, but there are 1 runs", '"run"'),
    (lambda d: d["experts"].update(slices=2), "moe_fused points need experts of 1 slice", '"moe_fused"'),
    (lambda d: (d.pop("experts"), d.pop("moe")), "moe points need experts", "{"),
]  # fmt: skip


def test_a_file_may_have_experts_in_both_families(tmp_path: Path) -> None:
    file = read(saved(tmp_path, fused_document()))
    assert [len(p.rows()) for p in (*file.moe, *file.moe_fused)] == [4, 4, 4, 4]
    assert set(file.moe_fused[0].rows()) ^ set(file.moe_fused[1].rows()) == {
        ("", "expand_topk_sum"), ("", "down_expand"),
    }  # fmt: skip
    assert vars(tiles(file.moe_fused[0].rows()["", "expand_swiglu"].config)).items() >= PAIR_FUSED.items()


@pytest.mark.parametrize(("change", "message", "line"), FUSED_REFUSED, ids=[m[:40] for _, m, _ in FUSED_REFUSED])
def test_a_bad_file_with_fused_experts_is_refused_with_its_line(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str, line: str
) -> None:
    refused_with_its_line(tmp_path, fused_document(), change, message, line)


@pytest.mark.parametrize(("change", "message", "line"), REFUSED, ids=[m[:40] for _, m, _ in REFUSED])
def test_a_bad_file_is_refused_with_its_line(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str, line: str
) -> None:
    refused_with_its_line(tmp_path, document(), change, message, line)


def refused_with_its_line(
    tmp_path: Path, content: dict[str, Any], change: Callable[[dict[str, Any]], object], message: str, line: str
) -> None:
    change(content)
    path = saved(tmp_path, content)
    with pytest.raises(ConfigError) as refused:
        read(path)
    text = str(refused.value)
    assert message in text
    number = int(text.removeprefix(f"{path}:").partition(":")[0])
    assert line in path.read_text().splitlines()[number - 1]


def test_an_expand_that_is_unsafe_with_its_warps_is_refused(tmp_path: Path) -> None:
    content = document()
    content["dense"][1]["modules"]["o"]["expand"]["config"]["num_warps"] = 4
    with pytest.raises(ConfigError, match="an expand of 64 rows a tile must have at most 2 warps, has 4"):
        read(saved(tmp_path, content))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: Expecting value"),
        ('{\n"format": 1,\n"format": 1}', ":3: 'format' is there twice"),
        ('{"a": [1,\n{"b": 1, "c": {},\n"b": 2}]}', ":3: 'b' is there twice"),
        ('{"format": 1,\n}', ":1: Illegal trailing comma|:2: Expecting property name"),
        ("[" * 200000, "recursion"),
        ("[]", ":1: file: Input should be"),
        ('{"format": 1} x', ":1: Extra data"),
    ],
)
def test_what_is_no_file_of_ours_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(saved(tmp_path, text))


def test_bytes_that_are_no_text_and_files_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(ConfigError, match=r"x\.json: .*No such file"):
        read(path)
    path.write_bytes(b'{"gpu": "\xff"}')
    with pytest.raises(ConfigError, match=r"x\.json: .*utf-8"):
        read(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_every_value_has_its_line(value: Any) -> None:
    text = json.dumps(value, indent=1)
    found, lines = parse(text, "x")
    assert found == value
    rows = text.splitlines()
    for path in lines:
        here = value
        for step in path:
            here = here[step]
        shown = json.dumps(here)
        assert (shown if not isinstance(here, list | dict) else "[" if isinstance(here, list) else "{") in rows[
            line_of(lines, path) - 1
        ]
