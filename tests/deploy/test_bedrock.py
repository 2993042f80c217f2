"""Merging against PEFT and transformers, and the import story against the local account."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.unit.importer_support import ATTENTION, EXPERT_PARAMETERS, make_config, make_model, with_lora
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lorahost_deploy.bedrock import job
from lorahost_deploy.bedrock.merge import merge
from lorahost_deploy.bedrock.tensors import from_mxfp4
from lorahost_deploy.errors import DeployError

from .conftest import DEMO, STORE, Account, Cli

DENSE = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
TOKENS = torch.tensor([[3, 9, 27, 5, 11, 42]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def packed(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random MXFP4 of (experts, out, in): blocks and scales, small enough for a model."""
    generator = torch.Generator().manual_seed(sum(shape))
    experts, out, n_in = shape
    blocks = torch.randint(0, 256, (experts, out, n_in // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 125, (experts, out, n_in // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


def test_mxfp4_is_what_transformers_reads() -> None:
    blocks, scales = packed((2, 6, 96))
    scales[0, 0] = torch.tensor([0, 127, 250])
    scales[0, 1] = torch.tensor([1, 200, 240])
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    ours = np.stack([from_mxfp4(b, s).T for b, s in zip(blocks.numpy(), scales.numpy(), strict=True)])
    assert np.array_equal(ours, expected.numpy())


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("Llama", {"target_modules": DENSE}),
        ("Qwen3", {"target_modules": DENSE, "use_rslora": True}),
        ("Qwen3Moe", {"target_modules": ATTENTION, "target_parameters": EXPERT_PARAMETERS}),
        ("Mixtral", {"target_modules": ATTENTION, "target_parameters": EXPERT_PARAMETERS}),
        ("GptOss", {"target_modules": ATTENTION, "target_parameters": EXPERT_PARAMETERS}),
    ],
)
def test_the_merged_model_says_what_peft_says(name: str, lora: dict[str, Any], tmp_path: Path) -> None:
    config = make_config(name)
    base = make_model(config)
    base.save_pretrained(tmp_path / "base", max_shard_size="60KB")
    plain = logits(base)
    adapted = with_lora(base, **lora)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = logits(adapted)
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out" / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), expected, atol=2e-5, rtol=1e-4)
    assert (expected - plain).abs().max() > 1e-3
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["merged"]


def test_an_mxfp4_base_becomes_bfloat16_with_the_change_in_it(tmp_path: Path) -> None:
    config = make_config("GptOss", intermediate_size=32)
    base = make_model(config)
    weights = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    stored = {
        name: t.to(torch.bfloat16) for name, t in weights.items() if not name.endswith(("gate_up_proj", "down_proj"))
    }
    for name, tensor in weights.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, n_in, out = tensor.shape
            blocks, scales = packed((experts, out, n_in))
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        else:
            weights[name] = stored[name].float()
    base.load_state_dict(weights)
    folder = tmp_path / "base"
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads(config.to_json_string())
    (folder / "config.json").write_text(json.dumps({**text, "quantization_config": {"quant_method": "mxfp4"}}))
    adapted = with_lora(base, target_modules=ATTENTION, target_parameters=["mlp.experts.gate_up_proj"])
    adapted.save_pretrained(tmp_path / "adapter")
    merge(folder, tmp_path / "adapter", tmp_path / "merged")

    got = load_file(tmp_path / "merged" / "model.safetensors")
    whole = adapted.merge_and_unload().state_dict()
    assert got.keys() == whole.keys()
    for name, tensor in got.items():
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor, whole[name].to(torch.bfloat16), atol=1e-6, rtol=2**-7)
    down = "model.layers.0.mlp.experts.down_proj"
    assert torch.equal(got[down].float(), weights[down])
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")


def test_what_can_not_be_merged_is_refused(tmp_path: Path) -> None:
    model, adapter = tmp_path / "model", DEMO / "adapters" / "pirate"
    shutil.copytree(DEMO / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(DeployError, match="quantised with 'fp8'"):
        merge(model, adapter, tmp_path / "out")
    (model / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    with pytest.raises(DeployError, match="pirate on"):
        merge(model, adapter, tmp_path / "out")
    (model / "config.json").write_text(json.dumps(config))
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(
        DeployError, match=r"no tensor for 1 modules of the adapter: model\.layers\.0\.self_attn\.q_proj"
    ):
        merge(model, adapter, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_bedrock_would_not_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="holds an adapter only: merge it first"):
        job.check_folder(DEMO / "adapters" / "pirate")
    job.check_folder(DEMO / "model")
    shutil.copytree(DEMO / "model", tmp_path / "model")
    config = json.loads((DEMO / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "architectures": ["OlmoeForCausalLM"]}))
    with pytest.raises(DeployError, match="Bedrock imports no OlmoeForCausalLM"):
        job.check_folder(tmp_path / "model")


def test_merges_imports_and_invokes(cli: Cli, account: Account, tmp_path: Path) -> None:
    """With the fake engine: what answers is a container of its own, as base model."""
    merge(DEMO / "model", DEMO / "adapters" / "pirate", tmp_path / "merged")
    cli("role", "--store", STORE, "--bedrock")
    words = ("bedrock", "import", "pirate", tmp_path / "merged", "--store", STORE)
    planned = json.loads(cli(*words, "--dry-run").stdout)
    assert [one["operation"] for one in planned[-2:]] == ["PutObject", "CreateModelImportJob"]
    assert "imported, arn:aws:bedrock" in cli(*words).stderr
    assert json.loads(cli(*words, "--dry-run").stdout) == []
    assert "imported already" in cli(*words).stderr
    said = cli("bedrock", "invoke", "pirate", "--prompt", "hi", "--max-tokens", 2)
    assert said.stdout.split() == ["base", "base"]
    refused = cli("bedrock", "import", "pirate", DEMO / "model", "--store", STORE, ok=False).stderr
    assert "remove it first, or take another name" in refused
    cli("bedrock", "rm", "pirate")
    cli("bedrock", "rm", "pirate")
    assert (
        "there is no modelIdentifier 'pirate'" in cli("bedrock", "invoke", "pirate", "--prompt", "x", ok=False).stderr
    )


def test_a_failed_import_says_why_and_can_be_tried_again(cli: Cli, account: Account) -> None:
    words = ("bedrock", "import", "plain", DEMO / "model", "--store", STORE)
    account.conduct.failing["plain"] = "the model's weights can't be read"
    assert "is Failed: the model's weights can't be read" in cli(*words, ok=False).stderr
    account.conduct.failing.clear()
    assert "imported, arn:aws:bedrock" in cli(*words).stderr
    cli("bedrock", "rm", "plain")
