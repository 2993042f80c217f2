"""`lorahost tune` and `python -m lorahost_kernels.tune` without a GPU: shapes, arguments, the plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.tune_command import run

from lorahost_kernels.tune import command
from lorahost_kernels.tuned.shape import KNOWN, Module, MoeShape, ShapeError, from_config, sharded

ROOT = Path(__file__).parents[2]
QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144,
    "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_hidden_layers": 48, "vocab_size": 151936,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": QWEN3_MOE,
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
        "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "num_hidden_layers": 24, "vocab_size": 201088, "quantization_config": {"quant_method": "mxfp4"},
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8,
        "num_experts_per_tok": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
        "vocab_size": 32000,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "hidden_size": 2048, "moe_intermediate_size": 1408, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "num_attention_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_hidden_layers": 27,
        "vocab_size": 102400,
    },
    "llama-3.3-70b": {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_key_value_heads": 8, "num_hidden_layers": 80, "vocab_size": 128256,
    },
    "qwen3-32b": {
        "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 64, "vocab_size": 151936,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_the_shape_that_its_name_gives(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    for path in (folder, folder / "config.json"):
        assert command.model_shape(str(path)) == KNOWN[name]


def test_a_nested_text_config_other_names_and_latent_attention_with_a_query_rank() -> None:
    llama4 = {
        "model_type": "llama4",
        "text_config": CONFIGS["mixtral-8x7b"] | {"model_type": "llama4_text", "num_experts_per_tok": 1},
    }
    assert from_config(llama4, "x").moe == MoeShape(8, 1, 4096, 14336, 2)
    renamed = {k: v for k, v in QWEN3_MOE.items() if k != "num_experts"} | {"num_local_experts": 128}
    assert from_config(renamed, "x").moe == KNOWN["qwen3-30b-a3b"].moe
    deepseek = CONFIGS["deepseek-v2-lite"] | {"q_lora_rank": 1536}
    modules = from_config(deepseek, "x").modules
    assert modules["qkv_a"] == Module(2048, (1536, 576))
    assert modules["q_b"] == Module(1536, (3072,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "model_type 'bert' is none of"),
        ({"num_experts": None}, "num_experts must be a positive integer, got None"),
        ({"hidden_size": "2048"}, "hidden_size must be a positive integer, got '2048'"),
        ({"vocab_size": True}, "vocab_size must be a positive integer, got True"),
    ],
)
def test_a_config_that_says_too_little(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        from_config(QWEN3_MOE | change, "x")


def test_tensor_parallel_parts() -> None:
    part = sharded(KNOWN["gpt-oss-20b"], 2)
    assert part.name == "gpt-oss-20b-tp2"
    assert part.moe == MoeShape(32, 4, 2880, 1440, 1)
    assert part.modules == {"qkv": Module(2880, (2048, 256, 256)), "o": Module(2048, (2880,))}
    with pytest.raises(ShapeError, match="intermediate=2880 can't be split over 7 GPUs"):
        sharded(KNOWN["gpt-oss-20b"], 7)


def test_dry_run_prints_the_plan_and_its_size() -> None:
    code, text = run("--model", "gpt-oss-20b", "--sizes", "1,16..64", "--budget", "90s", "--dry-run")
    assert code == 0, text
    lines = text.splitlines()
    assert lines[0] == "gpt-oss-20b: 8 points, 8 adapters, rank 32, budget 90 s"
    assert lines[1].startswith("  moe_fused 8x32  M=16")
    assert "candidates" in lines[-1]


@pytest.mark.parametrize(
    ("model", "arguments", "families"),
    [
        ("gpt-oss-20b", (), ["moe_fused", "dense"]),
        ("gpt-oss-120b", ("--tensor-parallel", "2"), ["moe_fused", "dense"]),
        ("qwen3-30b-a3b", (), ["moe", "dense"]),
        ("qwen3-32b", (), ["dense"]),
        ("gpt-oss-20b", ("--families", "moe", "dense"), ["moe", "dense"]),
        ("gpt-oss-20b", ("--families", "moe_fused", "moe"), ["moe_fused", "moe"]),
    ],
)  # fmt: skip
def test_dry_run_plans_the_experts_that_the_models_engines_run(
    model: str, arguments: tuple[str, ...], families: list[str]
) -> None:
    code, text = run("--model", model, "--sizes", "16", "--dry-run", *arguments)
    assert code == 0, text
    assert [line.split()[0] for line in text.splitlines()[1:-1]] == families


def test_without_a_gpu_the_error_is_clear(tmp_path: Path) -> None:
    code, text = run("--model", "gpt-oss-20b", "--out", str(tmp_path / "x.json"))
    assert code == 1
    assert text == "error: tuning needs an NVIDIA GPU that torch can use; --dry-run prints the plan anywhere\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt-5"], "'gpt-5' is no file, no directory with a config.json, and none of gpt-oss-20b"),
        (["--model", "qwen3-32b", "--families", "moe", "--dry-run"], "qwen3-32b has no moe operations"),
        (
            ["--model", "qwen3-30b-a3b", "--families", "moe_fused", "--dry-run"],
            "qwen3-30b-a3b has no moe_fused operations",
        ),
        (["--model", "gpt-oss-20b", "--tensor-parallel", "7"], "can't be split over 7 GPUs"),
        ([], "--model"),
        (["--model", "x", "--budget", "fast"], "'fast' is no time such as 90s, 8m or 1h"),
        (["--model", "x", "--sizes", "0"], "'0' is no size or first..last, from 1 to 65536"),
        (["--model", "x", "--sizes", "8..4"], "'8..4' is no size"),
        (["--model", "x", "--rank", "0"], "'0' is no whole number from 1 to 512"),
        (["--model", "x", "--rank", "16,,32"], "'' is no whole number from 1 to 512"),
        (["--model", "x", "--nonsense"], "--nonsense"),
    ],
)
def test_arguments_that_are_refused(arguments: list[str], message: str) -> None:
    code, text = run(*arguments)
    assert code in (1, 2)
    assert message in text


def test_sizes_and_times() -> None:
    assert command.batch_sizes("1,2,4..8192") == [2**i for i in range(14)]
    assert command.batch_sizes("3..20") == [3, 6, 12]
    assert [command.seconds(t) for t in ("90", "90s", "8m", "0.5h")] == [90, 90, 480, 1800]


def test_the_package_alone_is_enough() -> None:
    """On a GPU host with torch, Triton and pydantic nothing of the server is there."""
    code = "import sys, lorahost_kernels.tune.command as c\n"
    code += "c.main(['--model', 'gpt-oss-20b', '--sizes', '16', '--dry-run'])\n"
    code += (
        "print(sorted({n.partition('.')[0] for n in sys.modules} & {'lorahost', 'click', 'torch', 'vllm', 'numpy'}))"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "kernels")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=environ
    )
    assert done.stdout.splitlines()[-1] == "[]"
