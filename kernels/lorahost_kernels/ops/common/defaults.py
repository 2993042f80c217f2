"""The tiles of a launch that was given none: a tuned table's, else the defaults of `lorahost_kernels.configs`."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lorahost_kernels.configs import (
    MULTIPROCESSORS,
    PROGRAMS,
    ExpandConfig,
    Launch,
    ShrinkConfig,
    chooser,
    expand_config,
    shrink_config,
    swiglu_config,
    topk_sum_config,
)
from lorahost_kernels.ops.common.routing import Routing
from lorahost_kernels.tuned.legal import fitted


@functools.cache
def programs_of(device: torch.device) -> int:
    """Programs that fill the device about once: the H200's number by its share of multiprocessors."""
    if device.type != "cuda":
        return PROGRAMS
    return max(1, PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count // MULTIPROCESSORS)


@functools.cache
def shared_limit_of(device: torch.device) -> int:
    """Bytes of shared memory that one program may have: an H200's where there is no GPU to ask."""
    if device.type != "cuda":
        return 227 * 1024
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def chosen(operation: str, routing: Routing, weights: Sequence[Tensor], columns: tuple[int, ...], rank: int) -> Any:
    """What the active chooser says about a launch, None where it says nothing."""
    choose = chooser()
    if choose is None:
        return None
    block_m = None if routing.work is None else routing.work.block_m
    slots, item = weights[0].shape[0], weights[0].element_size()
    return choose.tiles(
        Launch(operation, routing.num_tokens, routing.topk, routing.num_experts, slots, rank, columns, block_m, item)
    )


def default_shrink(routing: Routing, lora_a: Sequence[Tensor], operation: str = "") -> ShrinkConfig:
    """The tuned tiles of this batch's shrink, else the default ones: by pairs where the routing has no work list."""
    slots, _, rank, k = lora_a[0].shape
    found = chosen(operation, routing, lora_a, (k,) * len(lora_a), rank)
    if isinstance(found, ShrinkConfig):
        return found
    block_m = None if routing.work is None else routing.work.block_m
    groups, device = slots * routing.num_experts, lora_a[0].device
    config = shrink_config(routing.num_pairs, groups, rank, k, len(lora_a), block_m, programs_of(device))
    return fitted(config, rank, shared_limit_of(device), lora_a[0].element_size())


def default_expand(routing: Routing, lora_b: Sequence[Tensor], operation: str = "") -> ExpandConfig:
    """The tuned tiles of this batch's expand, else the default ones."""
    slots, _, n, rank = lora_b[0].shape
    found = chosen(operation, routing, lora_b, tuple(b.shape[2] for b in lora_b), rank)
    if isinstance(found, ExpandConfig):
        return found
    block_m = None if routing.work is None else routing.work.block_m
    groups, device = slots * routing.num_experts, lora_b[0].device
    sizes = (routing.num_pairs, groups, rank, n)
    if operation == "expand_topk_sum":
        return topk_sum_config(routing.topk, rank)
    if operation == "expand_swiglu":
        config = swiglu_config(*sizes, block_m, programs_of(device))
    else:
        config = expand_config(*sizes, len(lora_b), block_m, programs_of(device))
    return fitted(config, rank, shared_limit_of(device), lora_b[0].element_size())
