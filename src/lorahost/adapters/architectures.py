"""LoRA targets of each supported architecture, after vLLM 0.26.0's model classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from lorahost.adapters.layout import DenseTarget, ExpertTarget, ModelLayout, Role, required
from lorahost.errors import AdapterRejectedError

Config = Mapping[str, Any]

_INTERNAL_ROUTER = (
    "vLLM 0.26.0's expert runner calls an unwrapped reference to this router, so LoRA on it would have no effect"
)
_SHARED_GATE = (
    "vLLM 0.26.0's shared expert calls an unwrapped reference to this gate, so LoRA on it would have no effect"
)
_KV_B = "vLLM absorbs kv_b_proj into the attention while decoding (MLA), so LoRA on it would be left out there"
_DENSE_MLP = "vLLM 0.26.0 only splits this model's dense gate_up_proj for LoRA when mlp_only_layers is set"
_EMBEDDING = "LoRA on embeddings is not supported"

_HF_NAMES: dict[Role, str] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_W_NAMES: dict[Role, str] = {"gate": "w1", "up": "w3", "down": "w2"}
_NAME_ALIASES: dict[str, Role] = {
    **{name: role for role, name in _HF_NAMES.items()},
    **{name: role for role, name in _W_NAMES.items()},
}


class _Builder:
    """Collects the targets of one model."""

    def __init__(self, config: Config, internal_router_lora: bool) -> None:
        self.config = config
        self.internal_router_lora = internal_router_lora
        self.hidden = required(config, "hidden_size")
        self.layers = required(config, "num_hidden_layers")
        self.dense: dict[str, DenseTarget] = {}
        self.experts: dict[str, ExpertTarget] = {}
        self.unservable = {"model.embed_tokens": _EMBEDDING, "lm_head": _EMBEDDING}

    def linear(
        self,
        name: str,
        n_in: int,
        n_out: int,
        *,
        fused: str | None = None,
        engine: str | None = None,
        alias: str | None = None,
    ) -> None:
        """Adds a linear layer; `fused` is the last part of the fused engine module, `alias` another name."""
        engine = engine or name
        parent = engine.rpartition(".")[0]
        aliases = (name,) if alias is None else (name, alias)
        target = DenseTarget(engine, name, aliases, n_in, n_out, f"{parent}.{fused}" if fused else None)
        self.dense.update(dict.fromkeys(aliases, target))

    def attention(self, layer: str, head_dim: int, engine: str = "self_attn") -> None:
        heads = required(self.config, "num_attention_heads")
        kv_heads = required(self.config, "num_key_value_heads", "num_attention_heads")
        for name, n_in, n_out, fused in (
            ("q_proj", self.hidden, heads * head_dim, "qkv_proj"),
            ("k_proj", self.hidden, kv_heads * head_dim, "qkv_proj"),
            ("v_proj", self.hidden, kv_heads * head_dim, "qkv_proj"),
            ("o_proj", heads * head_dim, self.hidden, None),
        ):
            self.linear(f"{layer}.self_attn.{name}", n_in, n_out, fused=fused, engine=f"{layer}.{engine}.{name}")

    def mlp(self, prefix: str, intermediate: int) -> None:
        self.linear(f"{prefix}.gate_proj", self.hidden, intermediate, fused="gate_up_proj")
        self.linear(f"{prefix}.up_proj", self.hidden, intermediate, fused="gate_up_proj")
        self.linear(f"{prefix}.down_proj", intermediate, self.hidden)

    def moe(
        self,
        block: str,
        num_experts: int,
        intermediate: int,
        *,
        alias: str | None = None,
        names: Mapping[Role, str] = _HF_NAMES,
        form: Literal["per_expert", "stacked"] = "per_expert",
        gpt_oss: bool = False,
    ) -> None:
        """Adds the routed experts of the block `block`, which checkpoints may also call `alias`."""
        aliases = tuple(f"{b}.experts" for b in (block, alias) if b)
        target = ExpertTarget(
            engine=f"{block}.experts",
            canonical=f"{block}.experts",
            aliases=aliases,
            num_experts=num_experts,
            hidden=self.hidden,
            intermediate=intermediate,
            form=form,
            interleaved=gpt_oss,
            transposed=gpt_oss,
            names=names,
            name_aliases=_NAME_ALIASES,
        )
        self.experts.update(dict.fromkeys(aliases, target))

    def router(self, name: str, num_experts: int, *, internal: bool, alias: str | None = None) -> None:
        if internal and not self.internal_router_lora:
            self.unservable[name] = _INTERNAL_ROUTER
        else:
            self.linear(name, self.hidden, num_experts, alias=alias)


def _head_dim(config: Config, default: int | None = None) -> int:
    value = config.get("head_dim")
    if value is not None:
        return required(config, "head_dim")
    return default or required(config, "hidden_size") // required(config, "num_attention_heads")


def _plain_head_dim(config: Config) -> int:
    """For the classes that don't read `head_dim`."""
    return required(config, "hidden_size") // required(config, "num_attention_heads")


def _dense(b: _Builder, head_dim: int) -> None:
    intermediate = required(b.config, "intermediate_size")
    for layer in (f"model.layers.{i}" for i in range(b.layers)):
        b.attention(layer, head_dim)
        b.mlp(f"{layer}.mlp", intermediate)


def _qwen_moe(b: _Builder, head_dim: int, *, internal_router: bool, shared: int) -> None:
    """Qwen2-MoE (with shared expert) and Qwen3-MoE; some layers may be dense."""
    experts = required(b.config, "num_experts", "num_local_experts")
    mlp_only = b.config.get("mlp_only_layers") or []
    step = b.config.get("decoder_sparse_step") or 1
    splits_dense = bool(mlp_only) or shared > 0
    for i in range(b.layers):
        layer = f"model.layers.{i}"
        b.attention(layer, head_dim)
        if i in mlp_only or (i + 1) % step:
            if splits_dense:
                b.mlp(f"{layer}.mlp", required(b.config, "intermediate_size"))
            else:
                b.unservable |= {f"{layer}.mlp.{n}": _DENSE_MLP for n in _HF_NAMES.values()}
            continue
        b.moe(f"{layer}.mlp", experts, required(b.config, "moe_intermediate_size"))
        b.router(f"{layer}.mlp.gate", experts, internal=internal_router)
        if shared:
            b.mlp(f"{layer}.mlp.shared_expert", shared)
            b.unservable[f"{layer}.mlp.shared_expert_gate"] = _SHARED_GATE


def _qwen3_moe(b: _Builder) -> None:
    _qwen_moe(b, _head_dim(b.config), internal_router=True, shared=0)


def _qwen2_moe(b: _Builder) -> None:
    shared = int(b.config.get("shared_expert_intermediate_size") or 0)
    _qwen_moe(b, _plain_head_dim(b.config), internal_router=False, shared=shared)


def _mixtral(b: _Builder) -> None:
    experts, intermediate = required(b.config, "num_local_experts"), required(b.config, "intermediate_size")
    for layer in (f"model.layers.{i}" for i in range(b.layers)):
        b.attention(layer, _head_dim(b.config))
        block, alias = f"{layer}.block_sparse_moe", f"{layer}.mlp"
        b.moe(block, experts, intermediate, alias=alias, names=_W_NAMES)
        b.router(f"{block}.gate", experts, internal=False, alias=f"{alias}.gate")


def _olmoe(b: _Builder) -> None:
    experts = required(b.config, "num_experts", "num_local_experts")
    for layer in (f"model.layers.{i}" for i in range(b.layers)):
        b.attention(layer, _plain_head_dim(b.config))
        b.moe(f"{layer}.mlp", experts, required(b.config, "intermediate_size"))
        b.router(f"{layer}.mlp.gate", experts, internal=False)


def _gpt_oss(b: _Builder) -> None:
    experts = required(b.config, "num_local_experts", "num_experts")
    for layer in (f"model.layers.{i}" for i in range(b.layers)):
        b.attention(layer, _head_dim(b.config, 64), engine="attn")
        b.moe(f"{layer}.mlp", experts, required(b.config, "intermediate_size"), form="stacked", gpt_oss=True)
        b.router(f"{layer}.mlp.router", experts, internal=False)


def _deepseek(b: _Builder) -> None:
    heads = required(b.config, "num_attention_heads")
    nope, rope = required(b.config, "qk_nope_head_dim"), required(b.config, "qk_rope_head_dim")
    v_dim, kv_rank = required(b.config, "v_head_dim"), required(b.config, "kv_lora_rank")
    q_out = heads * (nope + rope)
    for i in range(b.layers):
        layer = f"model.layers.{i}"
        attn = f"{layer}.self_attn"
        if b.config.get("q_lora_rank") is None:
            b.linear(f"{attn}.q_proj", b.hidden, q_out)
            b.linear(f"{attn}.kv_a_proj_with_mqa", b.hidden, kv_rank + rope)
        else:
            q_rank = required(b.config, "q_lora_rank")
            b.linear(f"{attn}.q_a_proj", b.hidden, q_rank, fused="fused_qkv_a_proj")
            b.linear(f"{attn}.q_b_proj", q_rank, q_out)
            b.linear(f"{attn}.kv_a_proj_with_mqa", b.hidden, kv_rank + rope, fused="fused_qkv_a_proj")
        b.linear(f"{attn}.o_proj", heads * v_dim, b.hidden)
        b.unservable[f"{attn}.kv_b_proj"] = _KV_B
        _deepseek_mlp(b, i, layer)


def _deepseek_mlp(b: _Builder, i: int, layer: str) -> None:
    is_moe = (
        b.config.get("n_routed_experts") is not None
        and i >= (b.config.get("first_k_dense_replace") or 0)
        and i % (b.config.get("moe_layer_freq") or 1) == 0
    )
    if not is_moe:
        b.mlp(f"{layer}.mlp", required(b.config, "intermediate_size"))
        return
    experts = required(b.config, "n_routed_experts")
    intermediate = required(b.config, "moe_intermediate_size")
    b.moe(f"{layer}.mlp", experts, intermediate)
    b.router(f"{layer}.mlp.gate", experts, internal=True)
    if b.config.get("n_shared_experts"):
        b.mlp(f"{layer}.mlp.shared_experts", intermediate * required(b.config, "n_shared_experts"))


SUPPORTED: dict[str, Callable[[_Builder], None]] = {
    "LlamaForCausalLM": lambda b: _dense(b, _head_dim(b.config)),
    "MistralForCausalLM": lambda b: _dense(b, _head_dim(b.config)),
    "Qwen2ForCausalLM": lambda b: _dense(b, _plain_head_dim(b.config)),
    "Qwen3ForCausalLM": lambda b: _dense(b, _head_dim(b.config, 128)),
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
    "OlmoeForCausalLM": _olmoe,
    "GptOssForCausalLM": _gpt_oss,
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek,
}

_LLAMA4 = (
    "the router's weight scales the experts' input there, and vLLM 0.26.0 gives LoRA on the experts the unscaled "
    "input, so an adapter's answers would be wrong"
)
# Why an architecture that vLLM serves has no adapters here.
REFUSED = {"Llama4ForCausalLM": _LLAMA4, "Llama4ForConditionalGeneration": _LLAMA4}


def build(config: Config, internal_router_lora: bool) -> ModelLayout:
    """The layout of the first architecture in the config; see `ModelLayout.from_config`."""
    architectures = config.get("architectures") or []
    architecture = architectures[0] if architectures else None
    if architecture in REFUSED:
        raise AdapterRejectedError(
            f"the base model's architecture {architecture!r} has no LoRA adapters here: {REFUSED[architecture]}; "
            f"supported: {', '.join(sorted(SUPPORTED))}",
            code="unsupported_architecture",
            details={"architecture": architecture, "supported": sorted(SUPPORTED)},
        )
    if architecture not in SUPPORTED:
        raise AdapterRejectedError(
            f"LoRA adapters can't be checked for the base model's architecture {architecture!r}; "
            f"supported: {', '.join(sorted(SUPPORTED))}",
            code="unsupported_architecture",
            details={"architecture": architecture, "supported": sorted(SUPPORTED)},
        )
    builder = _Builder(config, internal_router_lora)
    SUPPORTED[architecture](builder)
    return ModelLayout(
        architecture=architecture,
        dense=builder.dense,
        experts=builder.experts,
        unservable=builder.unservable,
        config=config,
        internal_router_lora=internal_router_lora,
    )
