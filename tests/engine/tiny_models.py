"""Tiny random MoE models, a byte-level tokenizer, PEFT adapters for them, and their Hugging Face reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

EXPERTS = 4
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERT_PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
# Standard deviation of all random weights: large enough that every module matters, and for the bf16 family small
# enough that rounding stays well below the tolerance of its tests.
WEIGHT_STD = {"qwen3_moe": 0.15, "mixtral": 0.15, "gpt_oss": 0.06}
SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 257,
}


@dataclass(frozen=True)
class AdapterSpec:
    """What one PEFT adapter targets."""

    name: str
    rank: int
    alpha: int
    attention: bool = True
    experts: bool = True


def config_of(family: str) -> Any:
    """Configuration of a 2-layer, 4-expert, top-2 model of a family: qwen3_moe, mixtral or gpt_oss."""
    shape = {**SHAPE, "initializer_range": WEIGHT_STD[family]}
    if family == "qwen3_moe":
        return Qwen3MoeConfig(
            **shape,
            intermediate_size=96,
            moe_intermediate_size=96,
            num_experts=EXPERTS,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )
    if family == "mixtral":
        return MixtralConfig(**shape, intermediate_size=96, num_local_experts=EXPERTS, sliding_window=None)
    if family == "gpt_oss":
        return GptOssConfig(**shape, intermediate_size=96, num_local_experts=EXPERTS, sliding_window=32)
    raise ValueError(f"unknown family {family}")


def build_model(family: str, target: Path, dtype: torch.dtype, seed: int = 0) -> Path:
    """Writes a random model of `family` with its tokenizer to `target`."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(family), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms, biases and sinks start all alike, which would hide errors.
            if parameter.std() < 1e-3:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(dtype) * 0.1)
    model.save_pretrained(target)
    build_tokenizer().save_pretrained(target)
    return target


def build_tokenizer() -> PreTrainedTokenizerFast:
    """258 tokens: the bytes, an end-of-text and a padding token; one-line chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    return fast


def build_adapter(base: Path, target: Path, spec: AdapterSpec, seed: int) -> Path:
    """Trains nothing: PEFT makes the adapter, both of its factors are set to random values, PEFT saves it.

    The values are representable in the base's dtype, so that casting to it loses nothing.
    """
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=list(ATTENTION) if spec.attention else [],
        target_parameters=list(EXPERT_PARAMETERS) if spec.experts else None,
        task_type="CAUSAL_LM",
    )
    return _randomised(model, config, target, seed)


def build_all_linear_adapter(base: Path, target: Path, rank: int, seed: int) -> Path:
    """As `build_adapter`, on everything that PEFT's `all-linear` means for the model: router and experts too."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return _randomised(model, config, target, seed)


def _randomised(model: Any, config: LoraConfig, target: Path, seed: int) -> Path:
    peft = get_peft_model(model, config)
    std = model.config.initializer_range
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                value = torch.randn(parameter.shape, generator=generator) * std
                parameter.copy_(value.to(model.dtype))
    peft.save_pretrained(target)
    return target


class Reference:
    """Hugging Face, with PEFT for an adapter, in fp32 on the CPU whatever the weights' dtype.

    Args:
        base: Model directory.
        adapter: PEFT adapter directory, or None for the base model.
    """

    def __init__(self, base: Path, adapter: Path | None = None) -> None:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
        self.model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
        self.model.eval()

    @torch.no_grad()
    def next_logprobs(self, prompt: Sequence[int], completion: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """What comes before each token of `completion`.

        Returns:
            Log-probabilities, `(tokens, vocabulary)` fp32, and `(tokens,)` the routing margin: how far the last
            expert chosen was ahead of the first one left out, in router logits, in the closest of the layers.
        """
        ids = torch.tensor([[*prompt, *completion]])
        output = self.model(input_ids=ids, output_router_logits=True)
        span = slice(len(prompt) - 1, -1)
        routers = torch.stack([logits.view(ids.shape[1], -1) for logits in output.router_logits])
        ranked = routers.float().sort(-1, descending=True).values
        top_k = SHAPE["num_experts_per_tok"]
        margin = (ranked[..., top_k - 1] - ranked[..., top_k]).amin(0)
        return output.logits[0, span].float().log_softmax(-1), margin[span]
