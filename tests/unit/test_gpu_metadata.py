"""The step's mapping tensors on the CPU, against what vLLM's own code puts into them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.lora.layers.utils import LoRAMapping
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.punica_wrapper.utils import convert_mapping

from lorahost_kernels.vllm_026 import dense_lists
from lorahost_kernels.vllm_026.gpu_metadata import (
    Groups,
    Staging,
    fill_dense_lists,
    fill_indices,
    fill_kernel_meta,
    groups_of,
    slots_of,
    staging_size,
)

MAX_TOKENS, MAX_LORAS, VOCAB = 48, 4, 1000
CPU = torch.device("cpu")
# what a tensor held before the step: nothing of it may be taken for this step's
STALE = 77
META = (
    "token_lora_mapping", "token_indices_sorted_by_lora_ids", "active_lora_ids", "num_tokens_per_lora",
    "lora_token_start_loc", "no_lora_flag_cpu", "num_active_loras_cpu",
)  # fmt: skip


def staging() -> Staging:
    return Staging(staging_size(MAX_TOKENS, MAX_LORAS, dense_lists.buffer_size(MAX_TOKENS, MAX_LORAS)), CPU)


def fresh_meta(captured: list[int] | None) -> Any:
    meta = LoRAKernelMeta.make(MAX_LORAS, MAX_TOKENS, CPU, captured)
    for name in META[:5]:
        getattr(meta, name).fill_(STALE)
    return meta


def fresh_wrapper() -> Any:
    wrapper = PunicaWrapperCPU(MAX_TOKENS, MAX_TOKENS, CPU)
    for name in ("_token_lora_indices", "_sampler_indices", "_sampler_indices_padded", "_embeddings_indices"):
        getattr(wrapper, name).fill_(STALE)
    return wrapper


@st.composite
def steps(draw: st.DrawFn) -> tuple[LoRAMapping, list[int | None]]:
    """A step's adapter ids by token and by prompt, and the adapter in each slot."""
    slots = draw(st.lists(st.none() | st.integers(1, 9), min_size=MAX_LORAS, max_size=MAX_LORAS))
    # an id is in one slot at most
    slots = [s if s is None or s not in slots[:i] else None for i, s in enumerate(slots)]
    ids = st.sampled_from([0, *(s for s in slots if s is not None)])
    tokens = draw(st.lists(ids, max_size=MAX_TOKENS))
    prompts = draw(st.lists(ids, max_size=MAX_TOKENS))
    return LoRAMapping(tuple(tokens), tuple(prompts)), slots


@given(steps())
@settings(deadline=None)
def test_indices_are_vllms(step: tuple[LoRAMapping, list[int | None]]) -> None:
    mapping, slots = step
    base, sampler, padded, embeddings, lengths = convert_mapping(mapping, slots, MAX_LORAS, VOCAB, 0, CPU)
    wrapper, tokens, prompts = (
        fresh_wrapper(),
        slots_of(mapping.index_mapping, slots),
        slots_of(mapping.prompt_mapping, slots),
    )
    with staging() as to:
        fill_indices(to, wrapper, tokens, prompts, MAX_LORAS, VOCAB)
    assert wrapper.indices_len == lengths
    assert torch.equal(wrapper.token_lora_indices, base)
    assert torch.equal(wrapper.sampler_indices, sampler)
    assert torch.equal(wrapper.sampler_indices_padded, padded)
    assert torch.equal(wrapper.embeddings_indices, embeddings)


@given(steps(), st.sampled_from([None, [1, 2, 5], [2]]))
@settings(deadline=None)
def test_kernel_metadata_is_vllms(step: tuple[LoRAMapping, list[int | None]], captured: list[int] | None) -> None:
    mapping, slots = step
    want, got, tokens = fresh_meta(captured), fresh_meta(captured), slots_of(mapping.index_mapping, slots)
    want.prepare_tensors(torch.from_numpy(tokens))
    with staging() as to:
        fill_kernel_meta(to, got, tokens, groups_of(tokens))
    used = tokens.size
    without = bool(want.no_lora_flag_cpu)
    for name in META:
        a, b = getattr(want, name), getattr(got, name)
        rows = used if name in META[:2] else len(a)
        # vLLM leaves the mapping as it was where no row has an adapter: nothing reads it then
        if not (without and name in META[:2]):
            assert torch.equal(a[:rows], b[:rows]), name
    assert (got.token_lora_mapping[used:] == -1).all()
    if without:
        assert (got.token_lora_mapping == -1).all()


@given(steps())
@settings(deadline=None)
def test_dense_lists_hold_each_row_with_an_adapter_once(step: tuple[LoRAMapping, list[int | None]]) -> None:
    mapping, ids = step
    slots = slots_of(mapping.index_mapping, ids)
    buffer = torch.full((dense_lists.buffer_size(MAX_TOKENS, MAX_LORAS),), STALE, dtype=torch.int32)
    with staging() as to:
        fill_dense_lists(to, buffer, groups_of(slots), MAX_TOKENS, MAX_LORAS)
    want = {slot: np.flatnonzero(slots == slot).tolist() for slot in sorted(set(slots.tolist()) - {-1})}
    for height in dense_lists.HEIGHTS:
        work = dense_lists.work_list(buffer, max(slots.size, 1), MAX_TOKENS, MAX_LORAS, height)
        assert work is not None
        found: dict[int, list[int]] = {}
        (count, *table), order = work.tile_table.tolist(), work.sorted_pairs.tolist()
        assert count <= work.max_tiles <= work.stride
        for tile in range(count):
            slot, first, rows = table[tile], table[work.stride + tile], table[2 * work.stride + tile]
            assert 1 <= rows <= height
            found.setdefault(slot, []).extend(order[first : first + rows])
        assert found == want
        assert count == sum(-(-len(rows) // height) for rows in want.values())


def test_a_tile_height_without_a_table_has_no_list() -> None:
    buffer = torch.zeros(dense_lists.buffer_size(MAX_TOKENS, MAX_LORAS), dtype=torch.int32)
    assert dense_lists.work_list(buffer, 8, MAX_TOKENS, MAX_LORAS, 128) is None


@pytest.mark.parametrize(("tokens", "loras"), [(1, 1), (7, 3), (8192, 16), (MAX_TOKENS, MAX_LORAS)])
def test_tables_do_not_overlap(tokens: int, loras: int) -> None:
    end = tokens
    for start, entries in dense_lists.layout(tokens, loras).values():
        assert start >= end
        assert start % 4 == 0, "tables start at 16 bytes"
        end = start + 1 + 3 * entries
    assert dense_lists.buffer_size(tokens, loras) == end


@pytest.mark.parametrize("ids", [(5,), (0, 1, 5, 1)])
def test_an_adapter_in_no_slot_is_named(ids: tuple[int, ...]) -> None:
    with pytest.raises(KeyError, match=r"adapter id 5 is in no slot; slots hold \[1, None, 3\]"):
        slots_of(ids, [1, None, 3])
    with pytest.raises(KeyError):
        convert_mapping(LoRAMapping(ids, ()), [1, None, 3], MAX_LORAS, VOCAB, 0, CPU)


def test_a_longer_step_leaves_nothing_behind() -> None:
    meta, to = fresh_meta(None), staging()
    for ids in ((1, 1, 2, 0, 2), (2, 0), ()):
        slots = slots_of(ids, [1, 2])
        with to:
            fill_kernel_meta(to, meta, slots, groups_of(slots))
        assert meta.token_lora_mapping.tolist() == [*slots.tolist(), *[-1] * (MAX_TOKENS - slots.size)]
    assert bool(meta.no_lora_flag_cpu)


def test_the_largest_step_fits_the_staging_memory() -> None:
    """Every row a prompt, each slot in use."""
    ids = [i % (MAX_LORAS + 1) for i in range(MAX_TOKENS)]
    slots = slots_of(ids, list(range(1, MAX_LORAS + 1)))
    buffer = torch.zeros(dense_lists.buffer_size(MAX_TOKENS, MAX_LORAS), dtype=torch.int32)
    groups, to = groups_of(slots), staging()
    for _ in range(9):
        with to:
            fill_kernel_meta(to, fresh_meta(None), slots, groups)
            fill_dense_lists(to, buffer, groups, MAX_TOKENS, MAX_LORAS)
            fill_indices(to, fresh_wrapper(), slots, slots, MAX_LORAS, VOCAB)
            fill_kernel_meta(to, fresh_meta(None), slots, groups)


def test_a_step_beyond_the_staging_memory_is_refused() -> None:
    with Staging(4, CPU) as to:
        to.room(6, torch.int32)
        with pytest.raises(ValueError, match="more than the 32 bytes"):
            to.room(3, torch.int32)


def test_groups_of_a_mixed_batch() -> None:
    found = groups_of(np.array([2, -1, 0, 2, -1]))
    assert isinstance(found, Groups)
    assert found.order.tolist() == [1, 4, 2, 0, 3]
    assert found.active.tolist() == [-1, 0, 2]
    assert found.counts.tolist() == [2, 1, 2]
    assert found.ends.tolist() == [2, 3, 5]
