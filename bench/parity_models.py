"""Tiny random models for the parity check, their PEFT adapters, and Hugging Face as the reference in fp32."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

VOCABULARY = 320
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
MLA = ("q_proj", "kv_a_proj_with_mqa", "o_proj")
# of a random linear layer, times 1 / sqrt(inputs); the router's keeps bf16 from swapping experts, the head's keeps
# the best tokens apart
GAIN, ROUTER_GAIN, HEAD_GAIN = 0.8, 2.0, 1.0
FP4_RMS = 2.93  # of random E2M1 codes
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 257,
}  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    """What one adapter targets; per_expert writes experts one by one, gate and up with their own A."""

    name: str
    rank: int
    alpha: int
    modules: tuple[str, ...] | str = ()
    parameters: tuple[str, ...] = ()
    per_expert: bool = False


@dataclass(frozen=True)
class Model:
    """A tiny model: config class, changes to SHAPE, and its adapters.

    Attributes:
        mxfp4: The experts are written as MXFP4 blocks and scales.
        engine: Engine arguments of every engine of this case.
        per_expert: Names of gate, up and down, in a template of (layer, expert).
    """

    family: str
    shape: Mapping[str, Any]
    adapters: tuple[Adapter, ...]
    mxfp4: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)
    per_expert: str = "model.layers.{}.mlp.experts.{}."
    projections: tuple[str, str, str] = MLP

    @property
    def top_k(self) -> int | None:
        """Experts of a token; None for a dense model."""
        value: int | None = self.shape.get("num_experts_per_tok")
        return value


MOE_ADAPTERS = (
    Adapter("full", 16, 16, ATTENTION, EXPERTS),
    Adapter("experts", 4, 8, (), EXPERTS),
    Adapter("attention", 8, 16, ATTENTION),
    Adapter("all-linear", 8, 12, "all-linear"),
    Adapter("per-expert", 4, 8, per_expert=True),
)
DENSE_ADAPTERS = (
    Adapter("full", 16, 16, (*ATTENTION, *MLP)),
    Adapter("mlp", 4, 8, MLP),
    Adapter("attention", 8, 16, ATTENTION),
)
GPT_OSS_ADAPTERS = (
    *MOE_ADAPTERS[:3],
    Adapter("router", 8, 12, (), ("mlp.router.weight", *EXPERTS)),
    MOE_ADAPTERS[-1],
)
DEEPSEEK_ADAPTERS = (
    Adapter("full", 16, 16, MLA, EXPERTS),
    Adapter("experts", 4, 8, (), EXPERTS),
    Adapter("attention", 8, 16, MLA),
    Adapter("router", 8, 12, (), ("mlp.gate.weight", *EXPERTS)),
    Adapter("per-expert", 4, 8, per_expert=True),
)
GPT_OSS: dict[str, Any] = {"num_experts_per_tok": 2, "sliding_window": 32, "intermediate_size": 96}
MODELS = {
    "qwen3-moe": Model(
        "Qwen3Moe",
        {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": 64, "num_experts": 8,
         "norm_topk_prob": True},
        MOE_ADAPTERS,
    ),
    "mixtral": Model(
        "Mixtral",
        {"num_experts_per_tok": 2, "intermediate_size": 96, "num_local_experts": 4, "sliding_window": None},
        MOE_ADAPTERS,
        per_expert="model.layers.{}.block_sparse_moe.experts.{}.",
        projections=("w1", "w3", "w2"),
    ),
    "gpt-oss": Model("GptOss", {**GPT_OSS, "num_local_experts": 4}, GPT_OSS_ADAPTERS),
    # as in GPT-OSS-20B, sizes are multiples of 64 and not of 128
    "gpt-oss-mxfp4": Model(
        "GptOss",
        {**GPT_OSS, "num_local_experts": 8, "num_experts_per_tok": 4, "hidden_size": 192, "intermediate_size": 192,
         "num_attention_heads": 4, "num_key_value_heads": 2},
        GPT_OSS_ADAPTERS,
        mxfp4=True,
        engine={"moe_backend": "triton_unfused"},
    ),
    "llama": Model("Llama", {"intermediate_size": 192}, DENSE_ADAPTERS),
    # the sizes of a head are DeepSeek's own: MLA kernels know no others
    "deepseek-v2": Model(
        "DeepseekV2",
        {"num_experts_per_tok": 2, "moe_intermediate_size": 96, "intermediate_size": 192, "n_routed_experts": 4,
         "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None,
         "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 1, "topk_group": 1,
         "topk_method": "greedy", "routed_scaling_factor": 1.0, "norm_topk_prob": False,
         "num_key_value_heads": 2},
        DEEPSEEK_ADAPTERS,
    ),
}  # fmt: skip


def build_model(model: Model, target: Path, seed: int) -> None:
    """Writes a random bf16 checkpoint of `model` to `target`, without a tokenizer."""
    shape = {**SHAPE, **model.shape}
    if model.family == "DeepseekV2":
        del shape["head_dim"]
    config = getattr(transformers, f"{model.family}Config")(**shape)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(_random(name, parameter, generator, transposed=model.family == "GptOss"))
    made.save_pretrained(target)
    if model.mxfp4:
        _to_mxfp4(target, generator)


def _random(name: str, parameter: torch.Tensor, generator: torch.Generator, transposed: bool) -> torch.Tensor:
    value = torch.randn(parameter.shape, generator=generator)
    if "norm" in name:
        return 1 + 0.1 * value
    if name.endswith("bias"):
        return 0.1 * value
    if parameter.dim() == 1 or "embed_tokens" in name:
        return value
    router = name.endswith(("router.weight", "mlp.gate.weight"))
    gain = HEAD_GAIN if "lm_head" in name else ROUTER_GAIN if router else GAIN
    return value * gain / math.sqrt(parameter.shape[-2 if transposed and parameter.dim() == 3 else -1])


def _to_mxfp4(target: Path, generator: torch.Generator) -> None:
    """Replaces the experts' weights by random MXFP4 ones, named and shaped as in OpenAI's checkpoints."""
    path = target / "model.safetensors"
    tensors = load_file(path)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, n_in, n_out = tensors.pop(name).shape
        exponent = 127 + round(math.log2(GAIN / math.sqrt(n_in) / FP4_RMS))
        size = (experts, n_out, n_in // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*size, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(
            exponent - 1, exponent + 2, size, generator=generator, dtype=torch.uint8
        )
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (target / "config.json").write_text(json.dumps(config, indent=2))


def load(model: Model, base: Path) -> Any:
    """The model in fp32, its MXFP4 weights as the floats that they stand for."""
    quantised = {"quantization_config": transformers.Mxfp4Config(dequantize=True)} if model.mxfp4 else {}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager", **quantised
    )
    return loaded.float().eval()


def build_adapter(model: Model, base: Path, target: Path, adapter: Adapter, seed: int) -> None:
    """Writes an adapter with random factors that bf16 holds exactly, as PEFT or an older trainer saves it."""
    generator = torch.Generator().manual_seed(seed)
    if adapter.per_expert:
        _write_per_expert(model, base, target, adapter, generator)
        return
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=adapter.modules if isinstance(adapter.modules, str) else list(adapter.modules),
        target_parameters=list(adapter.parameters) or None,
        task_type="CAUSAL_LM",
    )
    peft = get_peft_model(load(model, base), config)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.copy_(_factor(parameter.shape, "lora_A" in name, generator))
    peft.save_pretrained(str(target))


def _factor(shape: torch.Size | tuple[int, ...], first: bool, generator: torch.Generator) -> torch.Tensor:
    std = 1 / math.sqrt(shape[-1]) if first else 0.15
    return (torch.randn(shape, generator=generator) * std).bfloat16().float()


def _write_per_expert(model: Model, base: Path, target: Path, adapter: Adapter, generator: torch.Generator) -> None:
    tensors = {}
    for path, weight in _pairs(model, load(model, base)):
        n_out, n_in = weight.shape
        tensors[f"base_model.model.{path}.lora_A.weight"] = _factor((adapter.rank, n_in), True, generator)
        tensors[f"base_model.model.{path}.lora_B.weight"] = _factor((n_out, adapter.rank), False, generator)
    target.mkdir(parents=True)
    save_file(tensors, target / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": adapter.rank, "lora_alpha": adapter.alpha,
              "target_modules": list(model.projections), "bias": "none"}  # fmt: skip
    (target / "adapter_config.json").write_text(json.dumps(config))


def _merge_per_expert(model: Model, loaded: Any, adapter: Adapter, source: Path) -> None:
    """Adds scale * B @ A of every expert to the weights of `loaded`."""
    tensors = load_file(source / "adapter_model.safetensors")
    with torch.no_grad():
        for path, weight in _pairs(model, loaded):
            a, b = (tensors[f"base_model.model.{path}.lora_{half}.weight"] for half in "AB")
            weight += b @ a * adapter.alpha / adapter.rank


def _pairs(model: Model, loaded: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in a checkpoint of one module per expert, view (out, in) of its weight): experts, then other MLPs."""
    for layer, block in enumerate(loaded.model.layers):
        experts: Any = getattr(block.mlp, "experts", None)
        for expert in range(0 if experts is None else experts.gate_up_proj.shape[0]):
            both, down = experts.gate_up_proj[expert], experts.down_proj[expert]
            if model.family == "GptOss":
                views = (both[:, 0::2].T, both[:, 1::2].T, down.T)
            else:
                views = (*both.chunk(2), down)
            path = model.per_expert.format(layer, expert)
            yield from ((path + name, view) for name, view in zip(model.projections, views, strict=True))
    for name, module in loaded.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in MLP:
            yield name, module.weight


class Reference:
    """Hugging Face in fp32, with PEFT for an adapter, or merged weights for one that PEFT can't express."""

    def __init__(self, model: Model, base: Path, adapter: Adapter | None = None, source: Path | None = None) -> None:
        self._top_k = model.top_k
        self._model = load(model, base)
        if adapter is not None and source is not None:
            if adapter.per_expert:
                _merge_per_expert(model, self._model, adapter, source)
            else:
                self._model = PeftModel.from_pretrained(self._model, source).eval()

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities after each token, and how safe its experts are.

        Args:
            ids: (batch, tokens).

        Returns:
            (batch, tokens, vocabulary), and (batch, tokens): how far the last expert chosen was ahead of the first
            one left out, in router logits, in the closest of the layers.
        """
        if self._top_k is None:
            logits = self._model(input_ids=ids).logits
            return logits.float().log_softmax(-1), torch.full(ids.shape, math.inf)
        output = self._model(input_ids=ids, output_router_logits=True)
        routers = torch.stack([r.float().view(*ids.shape, -1) for r in output.router_logits])
        ranked = routers.sort(-1, descending=True).values
        margin = (ranked[..., self._top_k - 1] - ranked[..., self._top_k]).amin(0)
        return output.logits.float().log_softmax(-1), margin
