"""What one step measures: everything that an engine start and its loads need to know; standard library only."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from lorahost.bench.loads import Choice, Load
from lorahost.bench.shapes import SHAPES, Shape

EnginePath = Literal["base", "stock", "ours", "ours-tuned", "lora-base"]
Via = Literal["engine", "http"]
Spec = Literal["none", "ngram", "synthetic"]
Weights = Literal["spread", "collapsed"]
PATHS: tuple[EnginePath, ...] = get_args(EnginePath)
SPECS: tuple[Spec, ...] = get_args(Spec)
SPEC_TOKENS = 3
SPEC_ALPHABET = 64
# what a step sets by its path, or for its server
OWN_VARIABLES = frozenset(
    f"LORAHOST_{name}" for name in ("KERNELS", "CONFIG_DIR", "PORT", "HOST", "BASE_NAME", "WORK_DIR", "LORA", "ENGINE")
)


@dataclass(frozen=True)
class Point:
    """One step; lengths in tokens. `alphabet` is how many different ids a prompt is made of, 0 for all."""

    path: EnginePath
    model: str = "gpt-oss-20b"
    layers: int = 0
    input: int = 1600
    output: int = 600
    loads: tuple[Load, ...] = (Load(concurrency=16),)
    requests: int = 0
    repeats: int = 3
    warmup: int = 2
    adapters: int = 8
    slots: int = 0
    rank: int = 32
    targets: tuple[str, ...] = ()
    choice: Choice = "round-robin"
    via: Via = "engine"
    kernels: Literal["", "on", "off"] = ""
    config_dir: str = ""
    moe_backend: str = "auto"
    weights: Weights = "spread"
    spec: Spec = "none"
    accept: float = 2.5
    alphabet: int = 0
    seed: int = 0
    benchmark: str = "retention"
    alternation: int = 1
    commit: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.model not in SHAPES:
            raise ValueError(f"model {self.model!r}: must be one of {sorted(SHAPES)}")
        if self.spec == "synthetic" and not 1 <= self.accept <= SPEC_TOKENS + 1:
            raise ValueError(f"accept {self.accept}: must be between 1 and {SPEC_TOKENS + 1} tokens a step")
        if taken := sorted(self.variables.keys() & OWN_VARIABLES):
            raise ValueError(f"extra {', '.join(taken)}: the step sets these itself")
        if self.kernels == "on" and self.path in ("base", "stock"):
            raise ValueError(f"kernels on: path {self.path} is measured without this package's kernels")
        for name in ("input", "output", "repeats", "adapters", "rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1")

    @property
    def shape(self) -> Shape:
        """The model."""
        return SHAPES[self.model]

    @property
    def lora(self) -> bool:
        """Whether the engine has LoRA enabled."""
        return self.path != "base"

    @property
    def uses_kernels(self) -> bool:
        """Whether the engine runs this package's kernels: by default on every LoRA path but stock."""
        return self.lora and self.path != "stock" and self.kernels != "off"

    @property
    def layer_count(self) -> int:
        """Layers that the model gets."""
        return self.layers or self.shape.layers

    @property
    def slot_count(self) -> int:
        """`max_loras`."""
        return self.slots or self.adapters

    @property
    def target_names(self) -> tuple[str, ...]:
        """What an adapter is on."""
        return self.targets or ("attention", "experts" if self.shape.moe else "mlp")

    @property
    def names(self) -> list[str]:
        """Who is asked, in round robin: the adapters, or nobody but the base model."""
        return [""] if self.path in ("base", "lora-base") else [f"a{i}" for i in range(self.adapters)]

    @property
    def seats(self) -> int:
        """`max_num_seqs`: 32, or the highest concurrency."""
        return max(32, *(load.concurrency for load in self.loads))

    def requests_of(self, load: Load) -> int:
        """Requests of one repeat: as asked, or two rounds of a closed loop, at least 4, or 64 of an open one."""
        return self.requests or (max(4, 2 * load.concurrency) if load.concurrency else 64)

    def speculative_config(self) -> dict[str, Any] | None:
        """vLLM's configuration of speculative decoding, or None.

        Synthetic acceptance needs a draft in every step: with prompts and outputs of few different ids, looking up
        the last id always finds one.
        """
        if self.spec == "none":
            return None
        lookup = 1 if self.spec == "synthetic" else 2
        config: dict[str, Any] = {
            "method": "ngram",
            "num_speculative_tokens": SPEC_TOKENS,
            "prompt_lookup_min": lookup,
            "prompt_lookup_max": 4,
        }
        if self.spec == "synthetic":
            config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": self.accept}
        return config

    @property
    def engine_extra(self) -> dict[str, Any]:
        """`extra` without the environment's variables: engine arguments."""
        return {name: value for name, value in self.extra.items() if name not in self.variables}

    @property
    def variables(self) -> dict[str, str]:
        """What `extra` says of LORAHOST_* variables, which the engine finds in its environment."""
        return {name: str(value) for name, value in self.extra.items() if name.startswith("LORAHOST_")}

    def row(self) -> dict[str, object]:
        """The columns that the step knows before it runs."""
        return {
            "benchmark": self.benchmark, "path": self.path, "via": self.via, "alternation": self.alternation,
            "model": self.model, "layers": self.layer_count, "input": self.input, "output": self.output,
            "adapters": self.adapters, "rank": self.rank, "targets": "+".join(self.target_names),
            "choice": self.choice,
            "weights": self.weights,
            "spec": self.spec if self.spec != "synthetic" else f"synthetic:{self.accept:g}",
            "slots": self.slot_count if self.lora else 0, "kernels": "on" if self.uses_kernels else "off",
            "moe_backend": self.moe_backend, "extra": json.dumps(self.extra, sort_keys=True) if self.extra else "",
        }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A step's options, the same for every module that runs steps."""
    add = parser.add_argument
    add("--path", required=True, choices=PATHS, help="which engine: see docs/benchmarks.md")
    add("--via", default="engine", choices=["engine", "http"], help="in the engine's process, or through the server")
    add("--kernels", default="", choices=["", "on", "off"], help="instead of what --path means")
    add("--alternation", type=int, default=1, help="number in the rows")
    add_common_arguments(parser)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """What does not depend on which engine it is."""
    add = parser.add_argument
    add("--model", default="gpt-oss-20b", choices=sorted(SHAPES))
    add("--layers", type=int, default=0, help="fewer layers than the model has")
    add("--input", type=int, default=1600, help="tokens of a prompt")
    add("--output", type=int, default=600, help="tokens of an answer")
    add("--loads", nargs="+", default=["closed:16"], metavar="closed:N|poisson:R")
    add("--requests", type=int, default=0, help="a repeat's; 0: two rounds of a closed loop, 64 of an open one")
    add("--repeats", type=int, default=3)
    add("--warmup", type=int, default=2, help="rounds before the first repeat, not counted")
    add("--adapters", type=int, default=8)
    add("--slots", type=int, default=0, help="max_loras; 0: one for each adapter")
    add("--rank", type=int, default=32)
    add("--targets", nargs="+", default=[], choices=["attention", "experts", "mlp"])
    add("--choice", default="round-robin", choices=["round-robin", "zipf"], help="whose request is next")
    add("--config-dir", default="", help="tuned tiles of ours-tuned; empty: those that are shipped")
    add("--moe-backend", default="auto")
    add(
        "--weights",
        default="spread",
        choices=["spread", "collapsed"],
        help="collapsed: all tokens take one set of experts",
    )
    add("--spec", default="none", choices=["none", "ngram", "synthetic"], help="speculative decoding")
    add("--accept", type=float, default=2.5, help="tokens a step of --spec synthetic")
    add("--alphabet", type=int, default=0, help="different ids in a prompt; 0: all, 64 for --spec synthetic")
    add("--seed", type=int, default=0)
    add("--benchmark", default="retention", help="name in the rows")
    add("--commit", default="", help="what is measured, where there is no checkout")
    add("--extra", type=json.loads, default={}, metavar="JSON", help="engine arguments and LORAHOST_* variables")
    add("--out", type=Path, default=Path("bench/results/retention.csv"), help="CSV file that gets the rows")
    add("--work", type=Path, default=None, help="folder for the model and the adapters, kept for the next step")


def from_arguments(options: argparse.Namespace) -> Point:
    """The step that was asked for.

    Raises:
        ValueError: a value is impossible; the message names it.
    """
    known = {f.name for f in fields(Point)}
    values = {k: v for k, v in vars(options).items() if k in known}
    values["loads"] = tuple(Load.parse(text) for text in options.loads)
    values["targets"] = tuple(options.targets)
    if not isinstance(options.extra, dict):
        raise ValueError(f"extra {options.extra!r}: must be a JSON object")
    if options.spec == "synthetic" and not options.alphabet:
        values["alphabet"] = SPEC_ALPHABET
    return Point(**values)


def to_arguments(point: Point) -> list[str]:
    """The command line that `from_arguments` reads back."""
    default = Point(point.path)
    line = ["--path", point.path]
    for name, value in vars(point).items():
        if name == "path" or value == getattr(default, name):
            continue
        flag = "--" + name.replace("_", "-")
        if name == "extra":
            line += [flag, json.dumps(value, sort_keys=True)]
        elif isinstance(value, tuple):
            line += [flag, *(str(v) for v in value)]
        else:
            line += [flag, str(value)]
    return line
