"""Which engines take turns: their names, backends and arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.bench_together_run import POINT

from lorahost.bench import together_plan


@pytest.mark.parametrize(
    ("paths", "extras", "message"),
    [
        ("base,lora-base", {}, r"paths 'lora-base': must be \[NAME=\]PATH"),
        ("base,../x=ours", {}, r"paths '../x=ours': must be"),
        ("ours,ours", {}, "'ours' is there twice"),
        ("ours,again=ours", {}, "nothing in their rows would tell 'ours' and 'again' apart"),
        ("ours", {"stock": {}}, "extra-of 'stock': no engine of this name; there are ours"),
    ],
)
def test_impossible_engines_are_refused(paths: str, extras: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        together_plan.specs(POINT, paths, extras)


def test_engines_have_names_backends_and_arguments_of_their_own() -> None:
    point = replace(POINT, moe_backend="triton_unfused", extra={"a": 1})
    found = together_plan.specs(point, "stock:marlin, graphs=ours,ours", {"graphs": {"jit_monitor_mode": "error"}})
    assert [(s.name, s.point.path, s.point.moe_backend, s.point.extra) for s in found] == [
        ("stock:marlin", "stock", "marlin", {"a": 1}),
        ("graphs", "ours", "triton_unfused", {"a": 1, "jit_monitor_mode": "error"}),
        ("ours", "ours", "triton_unfused", {"a": 1}),
    ]


def test_engines_may_be_behind_the_server_with_slots_and_speculation_of_their_own() -> None:
    paths = "stock:marlin@http,few=ours@http,ours,spec=ours"
    found = together_plan.specs(POINT, paths, {}, {"few": 4}, {"spec": "synthetic", "stock:marlin@http": "ngram"})
    assert [(s.name, s.file_name, s.point.path, s.point.moe_backend, s.point.via, s.point.slots) for s in found] == [
        ("stock:marlin@http", "stock-marlin-http", "stock", "marlin", "http", 0),
        ("few", "few", "ours", "auto", "http", 4),
        ("ours", "ours", "ours", "auto", "engine", 0),
        ("spec", "spec", "ours", "auto", "engine", 0),
    ]
    assert [(s.point.spec, s.point.alphabet) for s in found] == [
        ("ngram", 0), ("none", 0), ("none", 0), ("synthetic", 64),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="slots-of 'many': no engine of this name"):
        together_plan.specs(POINT, "ours", {}, {"many": 4})
    with pytest.raises(ValueError, match="spec-of 'many': no engine of this name"):
        together_plan.specs(POINT, "ours", {}, {}, {"many": "ngram"})
