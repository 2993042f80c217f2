"""Two small batches, one as in decode and one as in prefill, with every kind of row that a step can have."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lorahost_kernels.configs import ExpandConfig, ShrinkConfig, expand_config, max_tiles, shrink_config
from lorahost_kernels.ops.common.defaults import shared_limit_of
from lorahost_kernels.ops.common.routing import Routing, WorkList, pair_keys
from lorahost_kernels.ops.work_list.naive import build_work_list
from lorahost_kernels.tuned.legal import fitted

SLOTS, EXPERTS, TOPK, RANK = 4, 3, 2, 16
# neither is a multiple of 128, as GPT-OSS's 2880
HIDDEN, WIDTH = 320, 192
# holds NaN: the adapter in it has no weights for the module
DISABLED = 3
# base rows, adapters, the disabled slot, and a stale slot of padding
SLOTS_OF = (0, -1, 1, 0, 2, DISABLED, 0, 99)
DECODE, PREFILL = 8, 64


@dataclass(frozen=True)
class Batch:
    """One step's rows on a device; block_m: rows per tile of its work list, None for a batch served by pairs."""

    device: torch.device
    dtype: torch.dtype
    routing: Routing
    block_m: int | None

    @property
    def working(self) -> Tensor:
        """bool (pairs,): pairs with LoRA work."""
        return pair_keys(self.routing, SLOTS) >= 0

    def draw(self, *shape: int, seed: int = 0) -> Tensor:
        """Standard normal values, the same ones in each call with one seed and shape."""
        g = torch.Generator(device="cpu").manual_seed(1000 * seed + sum(shape))
        return torch.randn(*shape, generator=g, dtype=torch.float32, device="cpu").to(self.device, self.dtype)

    def weights(self, *shapes: tuple[int, int]) -> list[Tensor]:
        """LoRA weights (slots, experts, *shape) of each slice, scaled to products of about 1; NaN in DISABLED."""
        experts = self.routing.num_experts
        found = [self.draw(SLOTS, experts, *shape, seed=i) / shape[1] ** 0.5 for i, shape in enumerate(shapes, 1)]
        for weights in found:
            weights[DISABLED] = float("nan")
        return found

    def hidden(self, slices: int) -> Tensor:
        """fp32 (splits, pairs, slices, rank) in two parts, as a shrink leaves it; NaN where it writes nothing."""
        h = self.draw(2, self.routing.num_pairs, slices, RANK).float()
        h[:, ~self.working] = float("nan")
        return h

    def shrink_config(self, k: int, slices: int) -> ShrinkConfig:
        """The default tiles; K in two parts where there is a work list."""
        pairs, groups = self.routing.num_pairs, SLOTS * self.routing.num_experts
        config = shrink_config(pairs, groups, RANK, k, slices, self.block_m)
        config = config if self.block_m is None else replace(config, split_k=2)
        return fitted(config, RANK, shared_limit_of(self.device), self.dtype.itemsize)

    def expand_config(self, n: int, slices: int) -> ExpandConfig:
        """The default tiles."""
        pairs, groups = self.routing.num_pairs, SLOTS * self.routing.num_experts
        config = expand_config(pairs, groups, RANK, n, slices, self.block_m)
        return fitted(config, RANK, shared_limit_of(self.device), self.dtype.itemsize)


def batch(device: torch.device, dtype: torch.dtype, tokens: int, dense: bool, block_m: int | None) -> Batch:
    """A batch of `tokens` rows. Experts get top-k weights, rows ordered by expert, and some pairs of expert -1."""
    slots = torch.tensor(SLOTS_OF, dtype=torch.int32, device="cpu").repeat(tokens)[:tokens].to(device)
    enabled = torch.ones(SLOTS + 1, dtype=torch.int32, device=device)
    enabled[DISABLED] = 0
    if dense:
        routing = Routing(slots, enabled)
    else:
        ids = expert_ids(tokens).to(device)
        g = torch.Generator(device="cpu").manual_seed(tokens)
        gates = torch.rand(tokens, TOPK, generator=g, dtype=torch.float32, device="cpu").to(device)
        routing = Routing(slots, enabled, EXPERTS, ids, gates, rows_by_expert(ids))
    routing = routing if block_m is None else with_tiles(routing, block_m)
    return Batch(device, dtype, routing, block_m)


def expert_ids(tokens: int) -> Tensor:
    """int32 (tokens, TOPK): most tokens share expert 0, so that one group fills more than a tile."""
    token = torch.arange(tokens, dtype=torch.int32, device="cpu")
    first = torch.where(token % 5 == 4, -1, 0)
    return torch.stack((first, 1 + token % 2), dim=1).to(torch.int32)


def rows_by_expert(ids: Tensor) -> Tensor:
    """int32 (pairs,): the row of each pair when rows are sorted by expert; -1 for expert -1."""
    flat = ids.flatten()
    order = torch.argsort(torch.where(flat < 0, EXPERTS, flat), stable=True)
    rows = torch.empty_like(flat)
    rows[order] = torch.arange(flat.numel(), dtype=flat.dtype, device=flat.device)
    return torch.where(flat < 0, -1, rows)


def with_tiles(routing: Routing, block_m: int) -> Routing:
    """The routing with a work list made in torch: the operation that makes it has a check of its own."""
    groups = build_work_list(routing, SLOTS, block_m)
    room = max_tiles(routing.num_pairs, SLOTS * routing.num_experts, block_m)
    tiles: list[tuple[int, int, int]] = []
    order: list[int] = []
    for key, pairs in groups:
        tiles += [(key, len(order) + at, min(block_m, len(pairs) - at)) for at in range(0, len(pairs), block_m)]
        order += pairs
    columns = torch.zeros(3, room, dtype=torch.int32, device="cpu")
    columns[:, : len(tiles)] = torch.tensor(tiles, dtype=torch.int32, device="cpu").T
    count = torch.tensor([len(tiles)], dtype=torch.int32, device="cpu")
    padded = torch.tensor(order + [0] * (routing.num_pairs - len(order)), dtype=torch.int32, device="cpu")
    device = routing.token_slots.device
    table = torch.cat((count, columns.flatten())).to(device)
    return replace(routing, work=WorkList(padded.to(device), table, room, block_m))
