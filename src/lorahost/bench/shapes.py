"""Shapes of the models that are measured with random weights, as Hugging Face configurations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lorahost.bench.files import write_whole

Json = dict[str, Any]
Family = Literal["gpt_oss", "qwen3", "qwen3_moe"]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Shape:
    """One model: its Hugging Face configuration without the layers, and how many of them it has."""

    name: str
    family: Family
    layers: int
    config: Json

    @property
    def moe(self) -> bool:
        """Whether it has experts."""
        return self.family != "qwen3"

    @property
    def vocab(self) -> int:
        """Token ids."""
        return int(self.config["vocab_size"])

    def hf_config(self, layers: int) -> Json:
        """config.json with `layers` layers; gpt-oss alternates sliding and full attention."""
        config = {**self.config, "num_hidden_layers": layers}
        if self.family == "gpt_oss":
            config["layer_types"] = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]
        return config


def _gpt_oss(mxfp4: bool, **sizes: int) -> Json:
    config: Json = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "torch_dtype": "bfloat16",
        "attention_bias": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "initial_context_length": 4096,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        **sizes,
        "experts_per_token": sizes["num_experts_per_tok"],
    }
    if mxfp4:
        dense = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": dense}
    return config


def _qwen3(architecture: str, **sizes: int) -> Json:
    return {
        "architectures": [architecture],
        "torch_dtype": "bfloat16",
        "attention_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        **sizes,
    }


def _qwen3_moe(**sizes: int) -> Json:
    moe = {"model_type": "qwen3_moe", "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return {**_qwen3("Qwen3MoeForCausalLM", **sizes), **moe}


_ALL = (
    Shape(
        "gpt-oss-20b", "gpt_oss", 24,
        _gpt_oss(
            True, hidden_size=2880, intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8,
            head_dim=64, num_local_experts=32, num_experts_per_tok=4, vocab_size=201088, eos_token_id=200002,
            pad_token_id=199999,
        ),
    ),
    Shape(
        "qwen3-32b", "qwen3", 64,
        {
            **_qwen3(
                "Qwen3ForCausalLM", hidden_size=5120, intermediate_size=25600, num_attention_heads=64,
                num_key_value_heads=8, head_dim=128, vocab_size=151936, eos_token_id=151645,
            ),
            "model_type": "qwen3",
        },
    ),
    Shape(
        "qwen3-30b-a3b", "qwen3_moe", 48,
        _qwen3_moe(
            hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_attention_heads=32,
            num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, vocab_size=151936,
            eos_token_id=151645,
        ),
    ),
    # to try a step on a CPU
    Shape(
        "tiny-gpt-oss", "gpt_oss", 2,
        _gpt_oss(
            False, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
            head_dim=32, num_local_experts=4, num_experts_per_tok=2, vocab_size=2048, eos_token_id=0, pad_token_id=1,
        ),
    ),
    Shape(
        "tiny-qwen3-moe", "qwen3_moe", 2,
        _qwen3_moe(
            hidden_size=64, intermediate_size=96, moe_intermediate_size=96, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2, vocab_size=2048, eos_token_id=0,
        ),
    ),
)  # fmt: skip
SHAPES = {shape.name: shape for shape in _ALL}


def write_config(shape: Shape, layers: int, folder: Path) -> None:
    """Writes config.json into `folder`, which is made."""
    write_whole(folder / "config.json", json.dumps(shape.hf_config(layers), indent=1))


def adapter_matrices(shape: Shape, layers: int, rank: int, targets: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Names and shapes of an adapter's tensors, as PEFT writes them for this family.

    Args:
        shape: The model.
        layers: How many layers it has.
        rank: The adapter's rank.
        targets: `attention`, and `experts` or `mlp`.
    """
    c = shape.config
    hidden, width = c["hidden_size"], c["head_dim"]
    heads, kv = c["num_attention_heads"] * width, c["num_key_value_heads"] * width
    pairs: dict[str, tuple[int, int]] = {}
    for layer in range(layers):
        prefix = f"base_model.model.model.layers.{layer}."
        if "attention" in targets:
            for name, size in zip(
                ATTENTION, ((hidden, heads), (hidden, kv), (hidden, kv), (heads, hidden)), strict=True
            ):
                pairs[f"{prefix}self_attn.{name}"] = size
        if "mlp" in targets:
            inner = c["intermediate_size"]
            for name, size in zip(MLP, ((hidden, inner), (hidden, inner), (inner, hidden)), strict=True):
                pairs[f"{prefix}mlp.{name}"] = size
        if "experts" in targets and shape.family == "qwen3_moe":
            inner = c["moe_intermediate_size"]
            for expert in range(c["num_experts"]):
                for name, size in zip(MLP, ((hidden, inner), (hidden, inner), (inner, hidden)), strict=True):
                    pairs[f"{prefix}mlp.experts.{expert}.{name}"] = size
    tensors = {}
    for module, (inputs, outputs) in pairs.items():
        tensors[f"{module}.lora_A.weight"] = (rank, inputs)
        tensors[f"{module}.lora_B.weight"] = (outputs, rank)
    if "experts" in targets and shape.family == "gpt_oss":
        # all experts of a projection are one parameter: PEFT stacks their ranks
        inner, ranks = c["intermediate_size"], rank * c["num_local_experts"]
        for layer in range(layers):
            experts = f"base_model.model.model.layers.{layer}.mlp.experts"
            tensors[f"{experts}.base_layer.lora_A.weight"] = (ranks, hidden)
            tensors[f"{experts}.base_layer.lora_B.weight"] = (2 * inner, ranks)
            tensors[f"{experts}.lora_A.weight"] = (ranks, inner)
            tensors[f"{experts}.lora_B.weight"] = (hidden, ranks)
    return tensors


def adapter_config(shape: Shape, rank: int, targets: tuple[str, ...]) -> Json:
    """adapter_config.json; the scale is 1."""
    modules = list(ATTENTION) if "attention" in targets else []
    config: Json = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "task_type": "CAUSAL_LM"}
    if "mlp" in targets or ("experts" in targets and shape.family == "qwen3_moe"):
        modules += MLP
    elif "experts" in targets:
        config["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return {**config, "target_modules": modules, "base_model_name_or_path": shape.name}
