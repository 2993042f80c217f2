"""Where LoRA can go in a base model, as vLLM 0.26.0 names and shapes it.

Module ids (the vocabulary of `ImportReport.modules` and of the worker's account of what it holds):

- a dense projection is named by its engine path before fusion: `model.layers.0.self_attn.q_proj`, never
  `...qkv_proj`; `model.layers.0.mlp.gate_proj`, never `...gate_up_proj`; GPT-OSS says `attn` for `self_attn`;
- the experts of one layer are two ids, `<experts engine module>.gate_up` and `<experts engine module>.down`,
  as in `model.layers.0.mlp.experts.gate_up`; an id counts as present when B·A is non-zero in any expert, and
  for `gate_up` in either half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lorahost.errors import AdapterRejectedError

Role = Literal["gate", "up", "down", "gate_up"]
"""A projection of an expert; `gate_up` is gate and up in one stacked matrix."""


@dataclass(frozen=True, slots=True)
class DenseTarget:
    """One linear layer.

    Attributes:
        engine: Engine path before fusion; the module id.
        canonical: Module path in the normalised adapter.
        aliases: Paths under which checkpoints mention it.
        in_features: Columns of lora_A.
        out_features: Rows of lora_B.
        fused_into: Engine module that holds it together with its siblings, or None.
    """

    engine: str
    canonical: str
    aliases: tuple[str, ...]
    in_features: int
    out_features: int
    fused_into: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertTarget:
    """The routed experts of one layer.

    Attributes:
        engine: Engine path of the experts module.
        canonical: Path in the normalised adapter, without expert number and projection.
        aliases: Paths under which checkpoints mention the experts module.
        num_experts: E.
        hidden: H, the input of gate and up and the output of down.
        intermediate: I, the output of gate and up (each) and the input of down.
        form: What the engine loads: one pair of tensors per expert and projection, or PEFT's stacked matrices.
        interleaved: Rows of the stacked gate_up are gate0, up0, gate1, ...; otherwise all gate, then all up.
        transposed: transformers keeps the weights as (E, in, out) rather than (E, out, in).
        names: Canonical name of gate, up and down.
        name_aliases: Projection name in a checkpoint -> role.
    """

    engine: str
    canonical: str
    aliases: tuple[str, ...]
    num_experts: int
    hidden: int
    intermediate: int
    form: Literal["per_expert", "stacked"]
    interleaved: bool
    transposed: bool
    names: Mapping[Role, str]
    name_aliases: Mapping[str, Role]

    def features(self, role: Role) -> tuple[int, int]:
        """(in_features, out_features) of one expert's projection."""
        if role == "down":
            return self.intermediate, self.hidden
        return self.hidden, self.intermediate * (2 if role == "gate_up" else 1)

    @property
    def gate_up_id(self) -> str:
        return f"{self.engine}.gate_up"

    @property
    def down_id(self) -> str:
        return f"{self.engine}.down"


@dataclass(frozen=True)
class ModelLayout:
    """All LoRA targets of one base model.

    Attributes:
        architecture: The class name that was used.
        dense: Checkpoint path -> target (a target appears once for each alias).
        experts: Checkpoint path of an experts module -> target.
        unservable: Checkpoint path of a module that exists, but on which LoRA can't be served -> the reason.
        config: The config.json that this was built from.
        internal_router_lora: See `from_config`.
    """

    architecture: str
    dense: Mapping[str, DenseTarget]
    experts: Mapping[str, ExpertTarget]
    unservable: Mapping[str, str]
    config: Mapping[str, Any] = field(repr=False)
    internal_router_lora: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, internal_router_lora: bool = False) -> ModelLayout:
        """Builds the layout from a Hugging Face config.json.

        Args:
            config: The parsed file.
            internal_router_lora: Stock vLLM 0.26.0 lets the expert runner of Qwen3-MoE and DeepSeek call its own,
                unwrapped reference to the router, so that LoRA on `mlp.gate` has no effect. Pass True where a
                plugin repairs that reference.

        Raises:
            AdapterRejectedError: unknown architecture, or a size that the config lacks.
        """
        from lorahost.adapters.architectures import build

        return build(config, internal_router_lora)

    def dense_targets(self) -> Iterator[DenseTarget]:
        """Each dense target once."""
        return iter({t.engine: t for t in self.dense.values()}.values())

    def expert_targets(self) -> Iterator[ExpertTarget]:
        """Each experts module once."""
        return iter({t.engine: t for t in self.experts.values()}.values())

    @property
    def engine_suffixes(self) -> tuple[str, ...]:
        """Last components of the engine modules that LoRA can be on; the engine need not wrap any other."""
        engines = [t.engine for t in self.dense_targets()] + [t.engine for t in self.expert_targets()]
        return tuple(sorted({engine.rpartition(".")[2] for engine in engines}))

    @property
    def module_ids(self) -> frozenset[str]:
        """Every id that `ImportReport.modules` can contain."""
        ids = {t.engine for t in self.dense_targets()}
        for target in self.expert_targets():
            ids |= {target.gate_up_id, target.down_id}
        return frozenset(ids)

    def summary(self) -> str:
        """The kinds of modules that carry LoRA, for error messages."""
        kinds = sorted({t.canonical.split(".", 3)[-1] for t in self.dense_targets()})
        kinds += sorted({t.canonical.split(".", 3)[-1] + ".*" for t in self.expert_targets()})
        return ", ".join(kinds)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` needs to build the same layout in another process."""
        return {"config": dict(self.config), "internal_router_lora": self.internal_router_lora}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelLayout:
        return cls.from_config(data["config"], internal_router_lora=data["internal_router_lora"])


def required(config: Mapping[str, Any], *names: str) -> int:
    """The first of `names` that the config has, as a positive integer.

    Raises:
        AdapterRejectedError: none is there, or it is not a positive integer.
    """
    for name in names:
        value = config.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise AdapterRejectedError(
                    f"config.json of the base model: {name} is {value!r}, expected a positive integer",
                    code="invalid_base_config",
                )
            return value
    raise AdapterRejectedError(
        f"config.json of the base model lacks {' or '.join(names)}; without it no adapter can be checked",
        code="invalid_base_config",
    )
