"""Dense and expert LoRA operations in torch, and vLLM's wrapper around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch


class TestGrouped:
    @pytest.fixture(params=[0, 10**9], ids=["by-weights", "by-row"])
    def grouped(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
        from lorahost_kernels.vllm_026 import grouped

        monkeypatch.setattr(grouped, "GATHER_LIMIT", request.param)
        return grouped

    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_against_float64(self, grouped: Any, dtype: torch.dtype, shared: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        slots, experts, rank, width, out, tokens = 3, 5, 4, 24, 20, 40

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        x, y = random(tokens, width), random(tokens, 64)
        a = random(slots, 1 if shared else experts, rank, width)
        b = random(slots, experts, out, rank)
        rows = torch.randperm(tokens, generator=generator)[:25]
        row_slot = torch.randint(0, slots, (25,), generator=generator)
        row_expert = torch.randint(0, experts, (25,), generator=generator)
        expected = y.double()
        for row, slot, expert in zip(rows.tolist(), row_slot.tolist(), row_expert.tolist(), strict=True):
            h = a[slot, 0 if shared else expert].double() @ x[row].double()
            expected[row, 8 : 8 + out] += b[slot, expert].double() @ h
        before = y.clone()

        h = grouped.shrink(x[rows], a, row_slot, row_expert)
        assert h.dtype == torch.float32
        grouped.expand(y, rows, h, b, row_slot, row_expert, offset=8)

        tolerance = 1e-5 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
        others = torch.ones(tokens, dtype=torch.bool)
        others[rows] = False
        assert torch.equal(y[others], before[others])
        assert torch.equal(y[:, :8], before[:, :8])
        assert torch.equal(y[:, 8 + out :], before[:, 8 + out :])

    def test_padding_of_b_beyond_the_output_is_ignored(self, grouped: Any) -> None:
        y = torch.zeros(2, 6)
        b = torch.ones(1, 1, 8, 3)
        grouped.expand(y, torch.tensor([1]), torch.ones(1, 3), b, torch.tensor([0]))
        assert y.tolist() == [[0.0] * 6, [3.0] * 6]


class TestCpuPunicaWrapper:
    """Slots 0 and 1 are both in use; rows are base, slot 1, base, slot 0."""

    @pytest.fixture
    def mapping(self) -> Any:
        from vllm.lora.layers import LoRAMapping

        return LoRAMapping(index_mapping=(0, 7, 0, 4), prompt_mapping=(0, 7, 0, 4), is_prefill=True)

    def linear(self, wrapper: Any) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        x, a, b = torch.randn(4, 6), torch.randn(2, 1, 3, 6), torch.randn(2, 1, 5, 3)
        y = torch.zeros(4, 5)
        wrapper.add_lora_linear(y, x, (a,), (b,), 1.0, (5,))
        expected = torch.zeros(4, 5)
        expected[1] = b[1, 0] @ (a[1, 0] @ x[1])
        expected[3] = b[0, 0] @ (a[0, 0] @ x[3])
        return y, expected

    def test_base_rows_stay_as_they_are(self, mapping: Any) -> None:
        from lorahost_kernels.vllm_026.cpu_punica import CpuPunicaWrapper

        wrapper = CpuPunicaWrapper(16, 4, "cpu")
        assert wrapper.token_slots(4) is None
        wrapper.update_metadata(mapping, [4, 7], 3, 320)
        y, expected = self.linear(wrapper)
        torch.testing.assert_close(y, expected)
        assert wrapper.token_slots(6).tolist() == [-1, 1, -1, 0, -1, -1]
        assert wrapper.token_slots(3).tolist() == [-1, 1, -1]

    def test_stock_gives_base_rows_the_last_slot(self, mapping: Any) -> None:
        """Why the wrapper exists; once this fails, vLLM has fixed it."""
        from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

        wrapper = PunicaWrapperCPU(16, 4, "cpu")
        wrapper.update_metadata(mapping, [4, 7], 3, 320)
        y, _ = self.linear(wrapper)
        assert y[0].abs().max() > 0

    def test_shrink_and_expand_apart(self, mapping: Any) -> None:
        from lorahost_kernels.vllm_026.cpu_punica import CpuPunicaWrapper

        wrapper = CpuPunicaWrapper(16, 4, "cpu")
        wrapper.update_metadata(mapping, [4, 7], 3, 320)
        torch.manual_seed(0)
        x, a, b = torch.randn(4, 6), torch.randn(2, 1, 3, 6), torch.randn(2, 1, 5, 3)
        buffer, y, whole = torch.zeros(2, 4, 3), torch.zeros(4, 12), torch.zeros(4, 12)
        wrapper.add_shrink(buffer, x, (a, a * 2), 0.5)
        wrapper.add_expand(y, buffer, (b, b), (5, 5), offset_start=2)
        wrapper.add_lora_linear(whole[:, 2:], x, (a, a * 2), (b, b), 0.5, (5, 5))
        torch.testing.assert_close(y, whole)
        assert whole[1].abs().max() > 0
        assert y[0].abs().max() == 0

    def test_logits_follow_the_sampled_rows(self) -> None:
        from vllm.lora.layers import LoRAMapping

        from lorahost_kernels.vllm_026.cpu_punica import CpuPunicaWrapper

        wrapper = CpuPunicaWrapper(16, 4, "cpu")
        mapping = LoRAMapping(index_mapping=(7, 7, 7, 0, 0), prompt_mapping=(7, 0), is_prefill=True)
        wrapper.update_metadata(mapping, [None, 7], 3, 320)
        torch.manual_seed(0)
        x, a, b = torch.randn(2, 6), torch.randn(2, 1, 3, 6), torch.randn(2, 1, 5, 3)
        y = torch.zeros(2, 5)
        wrapper.add_lora_logits(y, x, a, b, 1.0)
        torch.testing.assert_close(y[0], b[1, 0] @ (a[1, 0] @ x[0]))
        assert y[1].abs().max() == 0
