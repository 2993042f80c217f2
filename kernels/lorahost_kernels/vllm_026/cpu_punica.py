"""vLLM's LoRA wrapper for the CPU, with base rows left alone.

Stock indexes the slots with -1 for a row without adapter, which in a mixed batch gives base rows the weights of
the last slot.
"""

# mypy: disallow-subclassing-any=False
from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform

from lorahost_kernels.vllm_026 import grouped
from lorahost_kernels.vllm_026.patching import patch

Rows = tuple[torch.Tensor, torch.Tensor]


class CpuPunicaWrapper(PunicaWrapperCPU):
    """Dense LoRA in torch; it also tells the MoE layers which token has which slot."""

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: Any, **kwargs: Any) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self._token_slots: torch.Tensor | None = None
        self._token_rows: Rows | None = None
        self._sampler_rows: Rows | None = None

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        slots = self.token_lora_indices
        self._token_rows = _rows_with_adapter(slots)
        self._token_slots = slots if self._token_rows is not None else None
        self._sampler_rows = _rows_with_adapter(self.sampler_indices)

    def token_slots(self, tokens: int) -> torch.Tensor | None:
        """Slot per token, `(tokens,)` int64, -1 for base; None when no token of the batch has an adapter.

        Tokens beyond the batch's mapping are padding, so base.
        """
        if self._token_slots is None:
            return None
        missing = tokens - self._token_slots.shape[0]
        if missing > 0:
            return torch.nn.functional.pad(self._token_slots, (0, missing), value=-1)
        return self._token_slots[:tokens]

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds `scale` times B·A·x to the slices of `y`, `(tokens, columns)`, in place."""
        if self._token_rows is None:
            return
        rows, slots = self._token_rows
        x = x.view(-1, x.shape[-1])[rows]
        offset = 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            h = grouped.shrink(x, a, slots) * scale
            grouped.expand(y[:, offset : offset + width], rows, h, b, slots)
            offset += width

    def add_shrink(
        self,
        y: tuple[torch.Tensor, ...] | torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        scale: float,
        **kwargs: Any,
    ) -> None:
        """Writes `scale` times A·x into the rows with adapter of y[slice]; the rest keeps its zeros."""
        if self._token_rows is None:
            return
        rows, slots = self._token_rows
        x = x.view(-1, x.shape[-1])[rows]
        for out, a in zip(y, lora_a_stacked, strict=True):
            h = grouped.shrink(x, a, slots) * scale
            out.view(-1, out.shape[-1])[rows, : h.shape[1]] = h.to(out.dtype)

    def add_expand(
        self,
        y: torch.Tensor,
        x: tuple[torch.Tensor, ...] | torch.Tensor,
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """Adds B·x[slice] to the slices of `y` that start at `offset_start`, in place."""
        if self._token_rows is None:
            return
        rows, slots = self._token_rows
        y = y.view(-1, y.shape[-1])
        offset = offset_start
        for h, b, width in zip(x, lora_b_stacked, output_slices, strict=True):
            grouped.expand(y[:, offset : offset + width], rows, h[rows], b, slots)
            offset += width

    def add_lora_embedding(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """Adds B·x to the rows of `y` with adapter, in place; `x` has A looked up already."""
        if self._token_rows is None:
            return
        rows, slots = self._token_rows
        grouped.expand(y, rows, x[rows], lora_b_stacked, slots)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds `scale` times B·A·x to the logits of sampled rows with adapter, in place."""
        if self._sampler_rows is None:
            return
        rows, slots = self._sampler_rows
        y = y.view(-1, y.shape[-1])
        h = grouped.shrink(x.view(-1, x.shape[-1])[rows], lora_a_stacked, slots) * scale
        grouped.expand(y, rows, h, lora_b_stacked, slots)


def _rows_with_adapter(slots: torch.Tensor) -> Rows | None:
    """Indices of the rows whose slot is not -1, and their slots; None when there is none."""
    rows = (slots >= 0).nonzero().squeeze(-1)
    return (rows, slots[rows]) if rows.numel() else None


def apply_patches() -> None:
    """Makes vLLM's CPU platform name our wrapper."""
    name = f"{CpuPunicaWrapper.__module__}.{CpuPunicaWrapper.__qualname__}"
    patch(type(current_platform), "get_punica_wrapper", classmethod(lambda cls: name))
