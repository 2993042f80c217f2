"""Tiny Hugging Face models with PEFT adapters, and the two readings of an adapter that the tests compare.

`peft_deltas` asks PEFT for the change of every weight; `canonical_deltas` rebuilds it from a normalised adapter by
the rules of vLLM's loader. Both give {(module id, expert or None): (out, in) matrix}, with gate and up apart as
`....gate` and `....up`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from safetensors.numpy import load_file, save_file

from lorahost.adapters.importer import ImportLimits, ImportReport, import_adapter
from lorahost.adapters.layout import ModelLayout
from lorahost.errors import AdapterRejectedError

Deltas = dict[tuple[str, int | None], np.ndarray]

HIDDEN, EXPERTS = 64, 4
COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 48}
MLA = {
    "n_routed_experts": EXPERTS,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
SPECIFIC: dict[str, dict[str, Any]] = {
    "Llama": {"intermediate_size": 96},
    "Mistral": {"intermediate_size": 96},
    "Qwen2": {"intermediate_size": 96},
    "Qwen3": {"intermediate_size": 96, "head_dim": 32},
    "Qwen3Moe": {**MOE, "num_experts": EXPERTS, "head_dim": 16, "mlp_only_layers": [0]},
    "Qwen2Moe": {**MOE, "num_experts": EXPERTS, "shared_expert_intermediate_size": 40},
    "Mixtral": {"num_experts_per_tok": 2, "intermediate_size": 24, "num_local_experts": EXPERTS},
    "Olmoe": {"num_experts_per_tok": 2, "intermediate_size": 24, "num_experts": EXPERTS},
    "GptOss": {"num_experts_per_tok": 2, "intermediate_size": 24, "num_local_experts": EXPERTS, "head_dim": 16},
    "DeepseekV2": {**MOE, **MLA, "q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy"},
    "DeepseekV3": {**MOE, **MLA, "q_lora_rank": 20, "n_shared_experts": 1},
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERT_PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LIMITS = ImportLimits(max_rank=64, max_bytes=1 << 30, dtype="float32")


def make_config(name: str, **changes: Any) -> transformers.PreTrainedConfig:
    """A tiny config of architecture `<name>ForCausalLM`."""
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **SPECIFIC[name], **changes})
    config.architectures = [f"{name}ForCausalLM"]
    return config


def make_model(config: transformers.PreTrainedConfig) -> Any:
    """A model with random weights in float32."""
    torch.manual_seed(0)
    return getattr(transformers, config.architectures[0])(config).float()


def make_layout(config: transformers.PreTrainedConfig, **kwargs: Any) -> ModelLayout:
    """The layout, through a config.json as transformers writes it."""
    return ModelLayout.from_config(json.loads(config.to_json_string(use_diff=False)), **kwargs)


def with_lora(model: Any, **kwargs: Any) -> PeftModel:
    """`model` with an adapter whose factors are all random."""
    peft_model = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 8, **kwargs}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(peft_model.named_parameters()):
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return peft_model


def peft_deltas(peft_model: PeftModel, layout: ModelLayout) -> Deltas:
    """What PEFT adds to every weight."""
    deltas: Deltas = {}
    for name, module in peft_model.base_model.model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        delta = module.get_delta_weight("default").detach().numpy()
        if delta.ndim == 2:
            deltas[engine_name(name, layout), None] = delta
            continue
        experts = engine_name(re.sub(r"(\.base_layer)+$", "", name), layout)
        if layout.architecture == "GptOssForCausalLM":
            delta = delta.swapaxes(1, 2)
        for e in range(len(delta)):
            if module.parameter_name == "down_proj":
                deltas[f"{experts}.down", e] = delta[e]
            elif layout.architecture == "GptOssForCausalLM":
                deltas[f"{experts}.gate", e], deltas[f"{experts}.up", e] = delta[e][0::2], delta[e][1::2]
            else:
                deltas[f"{experts}.gate", e], deltas[f"{experts}.up", e] = np.split(delta[e], 2)
    return deltas


def engine_name(name: str, layout: ModelLayout) -> str:
    """vLLM's module path for a path of transformers 5."""
    name = name.removesuffix(".base_layer")
    if layout.architecture == "MixtralForCausalLM":
        return name.replace(".mlp.", ".block_sparse_moe.")
    if layout.architecture == "GptOssForCausalLM":
        return name.replace(".self_attn.", ".attn.")
    return name


def canonical_deltas(directory: Path, layout: ModelLayout) -> Deltas:
    """What vLLM adds, by its reading of a normalised adapter (B·A; the scale must be 1)."""
    config = json.loads((directory / "adapter_config.json").read_text())
    assert config["lora_alpha"] == config["r"]
    assert not config.get("rank_pattern")
    tensors = load_file(directory / "adapter_model.safetensors")
    deltas: Deltas = {}
    for key in sorted(tensors):
        name, half = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", key).groups()
        if half == "B":
            continue
        a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")]
        if match := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)", name):
            roles = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
            assert a.shape[0] == config["r"]
            deltas[f"{match[1]}.{roles[match[3]]}", int(match[2])] = b @ a
        elif ".experts" in name and "shared" not in name:
            _stacked_deltas(deltas, name, a, b, config["r"])
        else:
            assert a.shape[0] == config["r"]
            deltas[engine_name(name, layout), None] = b @ a
    return deltas


def _stacked_deltas(deltas: Deltas, name: str, a: np.ndarray, b: np.ndarray, rank: int) -> None:
    a = a.reshape(-1, rank, a.shape[-1])
    b = b.reshape(b.shape[0], rank, -1).transpose(2, 0, 1)
    for e in range(len(a)):
        if name.endswith(".base_layer"):
            both = b[e] @ a[e]
            experts = name.removesuffix(".base_layer")
            deltas[f"{experts}.gate", e], deltas[f"{experts}.up", e] = both[0::2], both[1::2]
        else:
            deltas[f"{name}.down", e] = b[e] @ a[e]


def assert_same(got: Deltas, expected: Deltas) -> None:
    """Same modules and same changes; what is all zeros need not be named on the other side."""
    for key in got.keys() | expected.keys():
        one, other = got.get(key), expected.get(key)
        if one is None or other is None:
            present = one if other is None else other
            assert not present.any(), f"{key} is only on one side, and not zero"
        else:
            np.testing.assert_allclose(one, other, atol=1e-5, rtol=0, err_msg=str(key))
            assert np.abs(other).max() > 1e-3, f"{key}: too small to compare"


def ids_of(deltas: Deltas) -> set[str]:
    """Module ids of the non-zero changes."""
    return {
        re.sub(r"\.(gate|up)$", ".gate_up", name) if e is not None else name
        for (name, e), d in deltas.items()
        if d.any()
    }


def import_saved(
    peft_model: PeftModel, layout: ModelLayout, tmp_path: Path, limits: ImportLimits = LIMITS
) -> tuple[ImportReport, Path]:
    """Saves with PEFT and imports."""
    peft_model.save_pretrained(tmp_path / "source")
    return import_adapter(tmp_path / "source", tmp_path / "target", layout, limits), tmp_path / "target"


def write_adapter(directory: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    """An adapter directory from tensors by module name and half, `<module>.A` and `<module>.B`."""
    directory.mkdir(parents=True, exist_ok=True)
    named = {
        f"base_model.model.{key[:-2]}.lora_{key[-1]}.weight": np.ascontiguousarray(value)
        for key, value in tensors.items()
    }
    save_file(named, directory / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "peft_version": "0.21.2"}
    (directory / "adapter_config.json").write_text(json.dumps({**fields, **config}))
    return directory


def random_pair(name: str, n_in: int, n_out: int, r: int = 4, seed: int = 0) -> dict[str, np.ndarray]:
    """Random factors of one module, for `write_adapter`."""
    rng = np.random.default_rng([seed, *name.encode()])
    return {
        f"{name}.A": rng.standard_normal((r, n_in)).astype(np.float32),
        f"{name}.B": rng.standard_normal((n_out, r)).astype(np.float32),
    }


QWEN3_Q = "model.layers.0.self_attn.q_proj"
QWEN3_EXPERTS = "model.layers.1.mlp.experts"
GOOD = random_pair(QWEN3_Q, 64, 64)


def refused(
    source: Path, tmp_path: Path, layout: ModelLayout | None = None, limits: ImportLimits = LIMITS
) -> AdapterRejectedError:
    """The refusal of `source` for a tiny Qwen3-MoE or `layout`; checks that no trace of a target is left."""
    out = tmp_path / "out"
    with pytest.raises(AdapterRejectedError) as e:
        import_adapter(source, out / "target", layout or make_layout(make_config("Qwen3Moe")), limits)
    assert not out.exists() or not list(out.iterdir())
    assert e.value.status in (400, 424)
    return e.value
