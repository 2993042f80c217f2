"""Batches that a correct LoRA kernel must serve, as small inputs with poison wherever nothing may be read."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lorahost_kernels.ops.common.routing import Routing, pair_keys
from lorahost_kernels.ops.work_list.launch import build_work_list

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# bf16 dot products are wrong in Triton's interpreter
DTYPES = (torch.float16, torch.bfloat16) if DEVICE.type == "cuda" else (torch.float32, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


@dataclass(frozen=True)
class Case:
    """slots_of: token slots; experts_of: (tokens, topk) experts; None draws them at random."""

    name: str
    tokens: int = 7
    topk: int = 2
    experts: int = 3
    slots: int = 3
    hidden: int = 80
    width: int = 48
    rank: int = 8
    slices: int = 2
    slots_of: Callable[[int], list[int]] | None = None
    experts_of: Callable[[int, int], list[list[int]]] | None = None
    disabled: tuple[int, ...] = ()
    shared_a: bool = False
    shared_b: bool = False
    swapped: bool = False
    padded_rows: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass
class Inputs:
    """One product's arguments; `untouched` marks the pairs that must keep their base output."""

    y: Tensor
    x: Tensor
    lora_a: list[Tensor]
    lora_b: list[Tensor]
    routing: Routing
    columns: list[int]
    untouched: Tensor = field(default_factory=lambda: torch.empty(0))


CASES = (
    Case("random mix of base rows and adapters"),
    Case("one token", tokens=1, slots_of=lambda m: [1]),
    Case("one adapter", tokens=9, slots_of=lambda m: [2] * m),
    Case("all pairs distinct", tokens=3, topk=1, slots_of=lambda m: [0, 1, 2]),
    Case("every pair on one expert", tokens=18, topk=1, rank=4, slices=1, slots_of=lambda m: [0] * m,
         experts_of=lambda m, k: [[1]] * m),
    Case("base rows only", slots_of=lambda m: [-1] * m),
    Case("padded tail with stale slots", tokens=6, slots_of=lambda m: [0, 1, 2, 3, 7, 99]),
    Case("expert -1 on another rank", tokens=4, experts_of=lambda m, k: [[-1, 2], [0, -1], [-1, -1], [1, 3]]),
    Case("attention-only adapter disabled", tokens=9, disabled=(1,)),
    Case("shared gate_up A", shared_a=True),
    Case("shared down B", shared_b=True, slices=1),
    Case("one interleaved slice", slices=1, width=96),
    Case("gate and up swapped", swapped=True),
    Case("columns that 128 does not divide", hidden=88, width=90),
    Case("output rows further apart", padded_rows=True),
    Case("rank 1", rank=1),
    Case("rank 4", rank=4),
    Case("rank 16", rank=16),
    Case("rank 64", rank=64, tokens=1, topk=1),
    Case("rank 256", rank=256, tokens=1, topk=1, slices=1, hidden=32, width=32),
)  # fmt: skip


def make(case: Case, dtype: torch.dtype, seed: int, down: bool = False, dense: bool = False) -> Inputs:
    """Inputs of gate_up, of down (x has a row for each pair, top-k weights apply) or of a dense layer.

    Slots that no row uses, and disabled ones, hold NaN; so does the gap between padded output rows.
    """
    g = torch.Generator().manual_seed(seed)
    topk, experts = (1, 1) if dense else (case.topk, case.experts)
    m = case.tokens
    slots = torch.randint(-1, case.slots, (m,), generator=g)
    if case.slots_of:
        slots = torch.tensor(case.slots_of(m))
    ids = torch.randint(0, experts, (m, topk), generator=g)
    if case.experts_of and not dense:
        ids = torch.tensor(case.experts_of(m, topk))
    enabled = torch.ones(case.slots + 1, dtype=torch.int32)
    enabled[list(case.disabled)] = 0
    routing = Routing(
        slots.to(torch.int32).to(DEVICE),
        enabled.to(DEVICE),
        experts,
        None if dense else ids.to(torch.int32).to(DEVICE),
        torch.rand(m, topk, generator=g).to(DEVICE) if down else None,
    )
    slices = 1 if down else case.slices
    draw = lambda *shape: torch.randn(*shape, generator=g).to(dtype).to(DEVICE)  # noqa: E731
    a = [draw(case.slots, 1 if case.shared_a else experts, case.rank, case.hidden) for _ in range(slices)]
    b = [draw(case.slots, 1 if case.shared_b else experts, case.width, case.rank) for _ in range(slices)]
    poison(a + b, routing, case.slots)
    if case.shared_a:
        a = [t.expand(-1, experts, -1, -1) for t in a]
    widths = [case.width] * slices
    columns = [sum(widths[:i]) for i in range(slices)]
    y = base_output((m,) if dense else (m, topk), sum(widths), case.padded_rows, draw)
    return Inputs(
        y,
        draw(m * topk if down else m, case.hidden),
        a,
        b,
        routing,
        columns[::-1] if case.swapped else columns,
        (pair_keys(routing, case.slots) < 0).view(y.shape[:-1]),
    )


def poison(weights: list[Tensor], routing: Routing, slots: int) -> None:
    """NaN into the slots that no pair with work uses."""
    keys = pair_keys(routing, slots)
    used = set((keys[keys >= 0] // routing.num_experts).tolist())
    for w in weights:
        w[[s for s in range(slots) if s not in used]] = float("nan")


def base_output(lead: tuple[int, ...], columns: int, padded: bool, draw: Callable[..., Tensor]) -> Tensor:
    """Random base output; padded: a view of rows 16 columns further apart, the gap NaN."""
    if not padded:
        return draw(*lead, columns)
    wide = draw(*lead, columns + 16)
    wide[..., columns:] = float("nan")
    return wide[..., :columns]


def with_work_list(inputs: Inputs, slots: int, block_m: int) -> Inputs:
    """The same inputs, their pairs grouped on the device."""
    return replace(inputs, routing=build_work_list(inputs.routing, slots, block_m))


def relative_error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference|| in float64; NaN never passes a comparison."""
    wide = reference.double()
    return float((out.double() - wide).norm() / wide.norm().clamp(min=1e-30))
