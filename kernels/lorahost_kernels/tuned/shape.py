"""Shapes of models: what their LoRA operations multiply, by name or from a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# Bytes of one expert weight, scales included, by the checkpoint's quantisation.
WEIGHT_BYTES = {"mxfp4": 0.53, "fp8": 1.0, "awq": 0.56, "gptq": 0.56}


class ShapeError(ValueError):
    """A config that says too little, or of a model that we don't know; the message names the field."""


@dataclass(frozen=True)
class MoeShape:
    """The experts of one layer; slices: 1 where gate and up are one interleaved tensor, else 2."""

    experts: int
    topk: int
    hidden: int
    intermediate: int
    slices: int

    @property
    def interleaved(self) -> bool:
        """Whether gate and up are one tensor, so that the expand can take over the activation."""
        return self.slices == 1

    @property
    def gate_up_width(self) -> int:
        """Output columns of each slice of gate_up."""
        return 2 * self.intermediate // self.slices


@dataclass(frozen=True)
class Module:
    """One LoRA-wrapped linear layer: columns in, columns out of each slice."""

    k: int
    outs: tuple[int, ...]


@dataclass(frozen=True)
class ModelShape:
    """A model's LoRA operations on one GPU; modules: the dense linear layers of one block.

    layers, vocab and weight_bytes (of one expert weight) serve estimates only.
    """

    name: str
    moe: MoeShape | None
    modules: Mapping[str, Module] = field(default_factory=dict)
    layers: int = 1
    vocab: int = 0
    weight_bytes: float = 2.0


def attention(hidden: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Module]:
    """The fused query, key and value projection and the output projection."""
    return {
        "qkv": Module(hidden, (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)),
        "o": Module(heads * head_dim, (hidden,)),
    }


def mlp(hidden: int, intermediate: int) -> dict[str, Module]:
    """A dense feed-forward block."""
    return {"gate_up": Module(hidden, (intermediate, intermediate)), "down": Module(intermediate, (hidden,))}


KNOWN = {
    s.name: s
    for s in (
        ModelShape(
            "gpt-oss-20b", MoeShape(32, 4, 2880, 2880, 1), attention(2880, 64, 8, 64), 24, 201088, WEIGHT_BYTES["mxfp4"]
        ),
        ModelShape(
            "gpt-oss-120b",
            MoeShape(128, 4, 2880, 2880, 1),
            attention(2880, 64, 8, 64),
            36,
            201088,
            WEIGHT_BYTES["mxfp4"],
        ),
        ModelShape("qwen3-30b-a3b", MoeShape(128, 8, 2048, 768, 2), attention(2048, 32, 4, 128), 48, 151936),
        ModelShape("mixtral-8x7b", MoeShape(8, 2, 4096, 14336, 2), attention(4096, 32, 8, 128), 32, 32000),
        ModelShape(
            "deepseek-v2-lite",
            MoeShape(64, 6, 2048, 1408, 2),
            {"q": Module(2048, (3072,)), "kv_a": Module(2048, (576,)), "o": Module(2048, (2048,))},
            27,
            102400,
        ),
        ModelShape(
            "llama-3.3-70b", None, {**attention(8192, 64, 8, 128), **mlp(8192, 28672)}, 80, 128256
        ),
        ModelShape("qwen3-32b", None, {**attention(5120, 64, 8, 128), **mlp(5120, 25600)}, 64, 151936),
    )
}  # fmt: skip

# model_type -> (key of an expert's intermediate size, slices)
EXPERTS = {
    "gpt_oss": ("intermediate_size", 1),
    "qwen2_moe": ("moe_intermediate_size", 2),
    "qwen3_moe": ("moe_intermediate_size", 2),
    "mixtral": ("intermediate_size", 2),
    "deepseek_v2": ("moe_intermediate_size", 2),
    "deepseek_v3": ("moe_intermediate_size", 2),
    "llama4_text": ("intermediate_size", 2),
}
# checkpoints and versions of transformers differ in the name
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
DENSE = ("llama", "mistral", "qwen2", "qwen3")


def whole(config: Mapping[str, Any], key: str) -> int:
    """A positive integer of the config. Raises ShapeError."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ShapeError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def linear_modules(config: Mapping[str, Any], kind: str) -> dict[str, Module]:
    """The dense linear layers of a block."""
    hidden, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
    if kind.startswith("deepseek"):
        return latent_attention(config, hidden, heads)
    head_dim = whole(config, "head_dim") if config.get("head_dim") else hidden // heads
    kv_heads = whole(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads
    found = attention(hidden, heads, kv_heads, head_dim)
    return found | mlp(hidden, whole(config, "intermediate_size")) if kind in DENSE else found


def latent_attention(config: Mapping[str, Any], hidden: int, heads: int) -> dict[str, Module]:
    """Multi-head latent attention; the absorbed kv_b projection takes no LoRA."""
    query = heads * (whole(config, "qk_nope_head_dim") + whole(config, "qk_rope_head_dim"))
    latent = whole(config, "kv_lora_rank") + whole(config, "qk_rope_head_dim")
    out = {"o": Module(heads * whole(config, "v_head_dim"), (hidden,))}
    if config.get("q_lora_rank") is None:
        return {"q": Module(hidden, (query,)), "kv_a": Module(hidden, (latent,))} | out
    narrow = whole(config, "q_lora_rank")
    return {"qkv_a": Module(hidden, (narrow, latent)), "q_b": Module(narrow, (query,))} | out


def from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape of a Hugging Face config.

    Raises:
        ShapeError: a field is missing or no positive integer, or the model type is not one that we know.
    """
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, Mapping) else config
    kind = str(config.get("model_type", ""))
    if kind not in EXPERTS and kind not in DENSE:
        raise ShapeError(f"config.json: model_type {kind!r} is none of {', '.join(sorted([*EXPERTS, *DENSE]))}")
    moe = None
    if kind in EXPERTS:
        intermediate, slices = EXPERTS[kind]
        experts = whole(config, next((k for k in EXPERT_COUNTS if config.get(k) is not None), EXPERT_COUNTS[0]))
        topk, hidden = whole(config, "num_experts_per_tok"), whole(config, "hidden_size")
        moe = MoeShape(experts, topk, hidden, whole(config, intermediate), slices)
    quantised = config.get("quantization_config")
    method = str(quantised.get("quant_method", "")) if isinstance(quantised, Mapping) else ""
    return ModelShape(
        name,
        moe,
        linear_modules(config, kind),
        whole(config, "num_hidden_layers"),
        whole(config, "vocab_size"),
        WEIGHT_BYTES.get(method, 2.0),
    )


# What tensor parallelism cuts by columns of the output; o and down are cut by columns of the input.
BY_OUTPUT = ("qkv", "gate_up", "q", "q_b")
BY_INPUT = ("o", "down")


def sharded(shape: ModelShape, ranks: int) -> ModelShape:
    """The part of one of `ranks` tensor-parallel GPUs, whole heads assumed. Raises ShapeError where it is uneven."""
    if ranks == 1:
        return shape

    def part(what: str, n: int) -> int:
        if n % ranks:
            raise ShapeError(f"{shape.name}: {what}={n} can't be split over {ranks} GPUs")
        return n // ranks

    def cut(name: str, m: Module) -> Module:
        if name in BY_OUTPUT:
            return Module(m.k, tuple(part(name, n) for n in m.outs))
        return Module(part(name, m.k), m.outs) if name in BY_INPUT else m

    moe = shape.moe and replace(shape.moe, intermediate=part("intermediate", shape.moe.intermediate))
    modules = {name: cut(name, m) for name, m in shape.modules.items()}
    return replace(shape, name=f"{shape.name}-tp{ranks}", moe=moe, modules=modules)
