"""Which adapter slot each row of the step's batch uses: vLLM's mapping tensors, filled without waiting for the GPU.

vLLM converts the mapping in a Python loop over tokens (1 ms for 1600) and asks the device twice how the batch looks.
Here numpy does both; the tensors that only vLLM's own kernels read are filled too, since some modules stay with them.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lorahost_kernels.vllm_026 import dense_lists

Slots = NDArray[np.int64]


def slots_of(adapter_ids: Sequence[int], slot_ids: Sequence[int | None]) -> Slots:
    """Slot of each row, -1 where the row's adapter id is 0 or less (no adapter).

    Raises:
        KeyError: an id that is in no slot.
    """
    ids = np.asarray(adapter_ids, dtype=np.int64)
    slots = np.full(ids.shape, -1, dtype=np.int64)
    for slot, adapter_id in enumerate(slot_ids):
        if adapter_id is not None and adapter_id > 0:
            slots[ids == adapter_id] = slot
    lost = ids[(ids > 0) & (slots < 0)]
    if lost.size:
        raise KeyError(f"adapter id {int(lost[0])} is in no slot; slots hold {list(slot_ids)}")
    return slots


@dataclass(frozen=True)
class Groups:
    """A batch's rows sorted by slot, as vLLM's kernels read them; active: slots in use, base rows (-1) first."""

    order: Slots
    active: Slots
    counts: Slots
    ends: Slots


def groups_of(slots: Slots) -> Groups:
    """See Groups."""
    active, counts = np.unique(slots, return_counts=True)
    return Groups(np.argsort(slots, kind="stable"), active, counts.astype(np.int64), np.cumsum(counts))


class Staging:
    """Pinned host memory that a step's small tensors are copied from, without asking the driver for more each step.

    A buffer is used again only when its copies are done; with several of them the host need not wait.
    """

    def __init__(self, size: int, device: Any, buffers: int = 4) -> None:
        cuda = torch.device(device).type == "cuda"
        self._buffers = [torch.empty(size, dtype=torch.int64, pin_memory=cuda) for _ in range(buffers)]
        self._events = [torch.cuda.Event() if cuda else None for _ in range(buffers)]  # type: ignore[no-untyped-call]
        self._turn = 0
        self._used = 0

    def __enter__(self) -> Staging:
        self._turn = (self._turn + 1) % len(self._buffers)
        self._used = 0
        if (event := self._events[self._turn]) is not None:
            event.synchronize()
        return self

    def __exit__(self, *failure: object) -> None:
        if (event := self._events[self._turn]) is not None:
            event.record()

    def room(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory for `length` elements, whose content goes to the device before the buffer's turn ends.

        Raises:
            ValueError: this turn's buffer is full.
        """
        words = -(-length * dtype.itemsize // 8)
        buffer = self._buffers[self._turn]
        if self._used + words > buffer.numel():
            raise ValueError(f"a step's metadata takes more than the {8 * buffer.numel()} bytes kept for it")
        self._used += words
        return buffer[self._used - words : self._used].view(dtype)[:length]

    def write(self, target: torch.Tensor, values: Slots) -> None:
        """Copies into the head of a device tensor."""
        if values.size:
            host = self.room(values.size, target.dtype)
            host.numpy()[:] = values
            target[: values.size].copy_(host, non_blocking=True)


def staging_size(max_tokens: int, max_loras: int, lists: int) -> int:
    """int64 elements that the largest step needs: six columns of 64 bits, four of 32, the small tables, the lists."""
    return 8 * max_tokens + 8 * (max_loras + 8) + lists


def fill_dense_lists(to: Staging, buffer: torch.Tensor, groups: Groups, max_tokens: int, max_loras: int) -> None:
    """Makes the step's work lists of the dense layers and sends them, in one copy."""
    first = int(groups.counts[0]) if groups.active.size and groups.active[0] < 0 else 0
    used = groups.active >= 0
    host = to.room(buffer.numel(), torch.int32)
    dense_lists.fill(
        host.numpy(), groups.order[first:], groups.active[used], groups.counts[used], max_tokens, max_loras
    )
    buffer.copy_(host, non_blocking=True)


def fill_kernel_meta(to: Staging, meta: Any, slots: Slots, groups: Groups) -> None:
    """What `LoRAKernelMeta.prepare_tensors` fills; rows behind the batch become base rows, as it should do too."""
    without = not groups.active.size or int(groups.active[-1]) < 0
    meta.no_lora_flag_cpu[0] = without
    meta.token_lora_mapping[slots.size :].fill_(-1)
    to.write(meta.token_lora_mapping, slots)
    used = 0 if without else groups.active.size
    to.write(meta.active_lora_ids, padded(groups.active[:used], meta.active_lora_ids, -1))
    to.write(meta.num_tokens_per_lora, padded(groups.counts[:used], meta.num_tokens_per_lora, 0))
    ends = np.concatenate((np.zeros(1, np.int64), groups.ends[:used]))
    to.write(meta.lora_token_start_loc, padded(ends, meta.lora_token_start_loc, 0))
    if not without:
        to.write(meta.token_indices_sorted_by_lora_ids, groups.order)
    captured = meta.captured_lora_counts
    at = bisect.bisect_left(captured, used)
    meta.num_active_loras_cpu[0] = captured[at] if used and at < len(captured) else used


def padded(values: Slots, target: torch.Tensor, filler: int) -> Slots:
    """The values, filled up to the target's length."""
    return np.concatenate((values, np.full(target.shape[0] - values.size, filler, np.int64)))


def fill_indices(to: Staging, wrapper: Any, tokens: Slots, prompts: Slots, max_loras: int, vocab_size: int) -> None:
    """The index tensors of `PunicaWrapperBase`, as its `_update_base_metadata` fills them."""
    rows = np.where(prompts < 0, max_loras - 1, prompts) * prompts.size + np.arange(prompts.size)
    to.write(wrapper._token_lora_indices, tokens)
    to.write(wrapper._sampler_indices, prompts)
    to.write(wrapper._sampler_indices_padded, rows)
    # first row: places in an adapter's own vocabulary, which vLLM no longer has
    wrapper._embeddings_indices[0, : tokens.size].fill_(0)
    to.write(wrapper._embeddings_indices[1], np.maximum(tokens, 0) * vocab_size)
    wrapper.indices_len[:] = [tokens.size, prompts.size, rows.size, tokens.size]
