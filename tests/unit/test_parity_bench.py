"""What `bench.parity` lets pass and what it doesn't, and what the MXFP4 case stands for."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.parity import ENGINES, plan
from bench.parity_compare import compare, line
from bench.parity_models import MODELS, build_model, load
from safetensors.torch import load_file

from lorahost_deploy.bedrock.tensors import from_mxfp4

STEPS = [{"ids": [7, 3, 5], "logprobs": [-1.0, -1.05, -2.0]}, {"ids": [4, 7, 9], "logprobs": [-0.5, -1.5, -2.5]}]
JOB = {"adapter": "a", "prompt": [1, 2], "steps": STEPS, "base": [-1.5, -1.1, -2.0]}
Answer = list[tuple[int, dict[int, float]]]


def answered() -> Answer:
    """Exactly what is expected."""
    return [(s["ids"][0], dict(zip(s["ids"], s["logprobs"], strict=True))) for s in STEPS]


def result(answer: Answer, engine: str = "ours-graphs", drafts: float | None = None, job: Any = JOB) -> dict[str, Any]:
    (row,) = compare("case", engine, [job], {"answers": {"alone": [answer]}, "drafts": drafts})
    return row


def test_the_expected_answer_passes() -> None:
    row = result(answered())
    assert row["passed"]
    assert (row["worst"], row["equal"], row["compared"], row["tokens"], row["effect"]) == (0, 2, 2, 2, 0.5)
    assert line(row).startswith("PASS")


@pytest.mark.parametrize(("change", "passes"), [(0.049, True), (-0.049, True), (0.051, False), (math.nan, False)])
def test_a_log_probability_is_within_the_tolerance(change: float, passes: bool) -> None:
    answer = answered()
    answer[1][1][9] += change
    row = result(answer)
    assert row["passed"] is passes
    assert passes or "token 1" in row["problems"][0]


def test_close_tokens_may_swap_and_end_the_comparison() -> None:
    answer = answered()
    answer[0] = (3, {3: -1.02, 7: -1.03, 5: -2.0})
    answer[1] = (11, {11: -0.1})
    row = result([*answer])
    assert (row["compared"], row["equal"]) == (1, 0)
    assert row["problems"] == ["only 1 of 2 tokens could be compared"]


def test_distant_tokens_may_not_swap() -> None:
    answer = answered()
    answer[1] = (7, answer[1][1])
    assert result(answer)["problems"] == ["alone, prompt of 2: token 1 is 7 where 4 leads by 1.00"]


def test_an_unexpected_likely_token_is_a_difference() -> None:
    answer = answered()
    answer[1][1][300] = -1.0
    assert result(answer)["worst"] == 1.5


def test_a_likely_token_that_the_engine_does_not_list_is_a_difference() -> None:
    answer = answered()
    del answer[0][1][3]
    assert result(answer)["worst"] == pytest.approx(0.95)


def test_missing_tokens_fail() -> None:
    assert not result(answered()[:1])["passed"]


def test_an_adapter_without_effect_fails_and_the_base_model_needs_none() -> None:
    job = {**JOB, "base": STEPS[0]["logprobs"]}
    assert "changes no log-probability" in result(answered(), job=job)["problems"][0]
    assert result(answered(), job={**job, "adapter": None})["passed"]


@pytest.mark.parametrize(("drafts", "passes"), [(None, False), (0, False), (12, True)])
def test_speculative_decoding_must_have_drafted(drafts: float | None, passes: bool) -> None:
    assert result(answered(), "ours-ngram", drafts)["passed"] is passes


def test_the_plan_gives_each_case_the_engines_that_it_can_run_on(tmp_path: Path) -> None:
    for case, mxfp4 in (("one", False), ("two", True)):
        (tmp_path / case).mkdir()
        (tmp_path / case / "case.json").write_text(json.dumps({"engine": {}, "mxfp4": mxfp4}))
        (tmp_path / case / "expected.json").write_text("[]")
    planned = plan(argparse.Namespace(cases=tmp_path, only=None, engines=None))
    device = {name for name, engine in ENGINES.items() if not engine.cpu and engine.gpus == 1}
    assert {engine for case, engine in planned if case == "one"} == device - {"ours-marlin"}
    assert {engine for case, engine in planned if case == "two"} == device
    assert plan(argparse.Namespace(cases=tmp_path, only=None, engines=["cpu"])) == [("one", "cpu")]
    assert plan(argparse.Namespace(cases=tmp_path, only=None, engines=["ours-fp16"])) == [
        ("one", "ours-fp16"),
        ("two", "ours-fp16"),
    ]
    (tmp_path / "two").rename(tmp_path / "gpt-oss")
    assert plan(argparse.Namespace(cases=tmp_path, only=None, engines=["ours-fp16"])) == [("one", "ours-fp16")]
    (tmp_path / "gpt-oss").rename(tmp_path / "two")
    assert plan(argparse.Namespace(cases=tmp_path, only=["two"], engines=["ours-tp2"])) == [("two", "ours-tp2")]


def test_the_mxfp4_reference_has_the_values_of_the_checkpoint(tmp_path: Path) -> None:
    model = MODELS["gpt-oss-mxfp4"]
    build_model(model, tmp_path / "model", seed=1)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    experts = load(model, tmp_path / "model").model.layers[1].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        key = f"model.layers.1.mlp.experts.{name}"
        values = from_mxfp4(stored[f"{key}_blocks"].numpy(), stored[f"{key}_scales"].numpy())
        assert torch.equal(getattr(experts, name), torch.from_numpy(values).transpose(1, 2))
        assert 0.3 < values.std() * values.shape[-1] ** 0.5 < 2
