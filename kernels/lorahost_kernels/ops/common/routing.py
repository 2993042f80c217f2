"""What every operation needs to know about the batch: which rows go to which adapter slot and expert."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class WorkList:
    """Pairs grouped by (slot, expert), cut into tiles of `block_m`; all on the device, read by LIST kernels.

    sorted_pairs: int32 (pairs,); tile_table: int32 (1 + 3 * table_tiles,), see ops.common.device.tile_rows.
    max_tiles: tiles that this batch can have at most; table_tiles: those that the table has room for, if more.
    """

    sorted_pairs: Tensor
    tile_table: Tensor
    max_tiles: int
    block_m: int
    table_tiles: int = 0

    @property
    def stride(self) -> int:
        """Entries of each of the table's three columns."""
        return max(self.table_tiles, self.max_tiles)


@dataclass(frozen=True)
class Routing:
    """One batch's rows.

    token_slots: int32 (M,), adapter slot of each token, -1 or >= the number of slots for none.
    adapter_enabled: int32 (>= slots,), 0 where the adapter in that slot has no weights for this module.
    num_experts: experts that the LoRA weights hold; 1 for a dense layer.
    topk_ids: int (M, topk) expert of each pair, -1 for none; None for a dense layer.
    topk_weights: float32 (M, topk), multiplied into down_expand; None means 1.
    pair_rows: int32 (pairs,), row of each pair in the buffers between the two base GEMMs (gate_up_expand's y,
        down_shrink's x); None where pair i has row i.
    """

    token_slots: Tensor
    adapter_enabled: Tensor
    num_experts: int = 1
    topk_ids: Tensor | None = None
    topk_weights: Tensor | None = None
    pair_rows: Tensor | None = None
    work: WorkList | None = None

    def __post_init__(self) -> None:
        ids, weights = self.topk_ids, self.topk_weights
        if ids is not None and (ids.dim() != 2 or ids.shape[0] != self.num_tokens or not ids.is_contiguous()):
            raise ValueError(f"topk_ids must be contiguous (tokens={self.num_tokens}, topk), got {tuple(ids.shape)}")
        if weights is not None and (ids is None or weights.shape != ids.shape or not weights.is_contiguous()):
            raise ValueError(f"topk_weights must match topk_ids and be contiguous, got {tuple(weights.shape)}")
        rows = self.pair_rows
        if rows is not None and (rows.shape != (self.num_pairs,) or rows.dtype != torch.int32):
            raise ValueError(f"pair_rows must be int32 ({self.num_pairs},), got {rows.dtype} {tuple(rows.shape)}")
        if ids is None and self.num_experts != 1:
            raise ValueError(f"num_experts={self.num_experts} needs topk_ids")

    @property
    def num_tokens(self) -> int:
        """Rows of the batch, padding included."""
        return int(self.token_slots.shape[0])

    @property
    def topk(self) -> int:
        """Experts per token; 1 for a dense layer."""
        return 1 if self.topk_ids is None else int(self.topk_ids.shape[1])

    @property
    def num_pairs(self) -> int:
        """tokens * topk."""
        return self.num_tokens * self.topk


def pair_keys(routing: Routing, num_slots: int) -> Tensor:
    """int64 (pairs,): slot * num_experts + expert, -1 where a pair has no LoRA work. Reference, in torch."""
    slots = routing.token_slots.to(torch.int64).repeat_interleave(routing.topk)
    experts = torch.zeros_like(slots) if routing.topk_ids is None else routing.topk_ids.reshape(-1).to(torch.int64)
    alive = (slots >= 0) & (slots < num_slots) & (experts >= 0) & (experts < routing.num_experts)
    enabled = routing.adapter_enabled[slots.clamp(0, num_slots - 1)] != 0
    return torch.where(alive & enabled, slots * routing.num_experts + experts, -1)


def check_weights(name: str, weights: Sequence[Tensor], routing: Routing, dtype: torch.dtype) -> None:
    """Raises ValueError unless `weights` are 1 to 4 tensors (slots, experts or 1, *, *) that kernels can address."""
    if not 1 <= len(weights) <= 4:
        raise ValueError(f"{name}: 1 to 4 slices are supported, got {len(weights)}")
    for w in weights:
        if w.dim() != 4 or w.shape[1] not in (1, routing.num_experts):
            raise ValueError(f"{name}: want (slots, experts={routing.num_experts}, *, *), got {tuple(w.shape)}")
        if w.stride(3) != 1:
            raise ValueError(f"{name}: the last dimension must be contiguous, got strides {w.stride()}")
        if w.dtype != dtype:
            raise ValueError(f"{name}: dtype {w.dtype} differs from the activations' {dtype}")


def expert_stride(weights: Tensor) -> int:
    """Elements between two experts; 0 where one factor is shared by all of them."""
    return 0 if weights.shape[1] == 1 else weights.stride(1)


def slice_columns(lora_b: Sequence[Tensor]) -> list[int]:
    """First output column of each slice where the slices follow each other."""
    starts = [0]
    for b in lora_b[:-1]:
        starts.append(starts[-1] + b.shape[2])
    return starts


def unweighted(routing: Routing) -> Routing:
    """The routing without its top-k weights."""
    return routing if routing.topk_weights is None else replace(routing, topk_weights=None)


def in_token_order(routing: Routing) -> Routing:
    """The routing for a buffer in which pair i has row i."""
    return routing if routing.pair_rows is None else replace(routing, pair_rows=None)
