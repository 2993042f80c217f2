"""Background loading of adapters, and which modules an adapter touches, with stand-ins for vLLM's managers."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class FakeManager:
    """The parts of vLLM's WorkerLoRAManager and LoRAModelManager that the preparer touches."""

    def __init__(self) -> None:
        self.loaded: set[int] = set()
        self.release = threading.Event()
        self.error: Exception | None = None
        self._adapter_manager = SimpleNamespace(_create_merged_loras_inplace=self.pack)
        self.packed: list[str] = []

    def list_adapters(self) -> set[int]:
        return self.loaded

    def pack(self, lora: Any) -> None:
        self.packed.append(lora.name)

    def load(self, request: Any) -> Any:
        assert self.release.wait(10)
        if self.error is not None:
            raise self.error
        return SimpleNamespace(name=request.lora_name)


class TestPreparer:
    @pytest.fixture
    def manager(self, monkeypatch: pytest.MonkeyPatch) -> FakeManager:
        from lorahost_kernels.vllm_026 import loading

        monkeypatch.setattr(loading, "_stock_load", lambda manager, request: manager.load(request))
        return FakeManager()

    @pytest.fixture
    def preparer(self, manager: FakeManager) -> Any:
        from lorahost_kernels.vllm_026.loading import AdapterPreparer

        return AdapterPreparer(manager)

    def request(self, engine_id: int = 3, name: str = "a@1", path: str = "/adapters/a") -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(name, engine_id, path)

    def wait(self, preparer: Any, engine_id: int) -> dict[str, Any]:
        preparer._preparations[engine_id].done.wait(10)
        answer: dict[str, Any] = preparer.poll(engine_id)
        return answer

    def test_reading_then_ready_then_taken_once(self, preparer: Any, manager: FakeManager) -> None:
        interval = sys.getswitchinterval()
        preparer.start("/adapters/a", "a@1", 3)
        assert preparer.poll(3)["state"] == "reading"
        manager.release.set()
        answer = self.wait(preparer, 3)
        assert answer["state"] == "ready"
        assert "error" not in answer
        assert sys.getswitchinterval() == pytest.approx(interval)
        assert preparer.take(self.request()).name == "a@1"
        assert manager.packed == ["a@1"]
        assert preparer.take(self.request()) is None
        with pytest.raises(KeyError, match="engine_id 3 is not being prepared"):
            preparer.poll(3)

    def test_take_waits_for_the_reader(self, preparer: Any, manager: FakeManager) -> None:
        preparer.start("/adapters/a", "a@1", 3)
        threading.Timer(0.05, manager.release.set).start()
        assert preparer.take(self.request()).name == "a@1"

    def test_failure_is_told_and_raised(self, preparer: Any, manager: FakeManager) -> None:
        manager.error = ValueError("rank 64 is greater than max_lora_rank 32")
        manager.release.set()
        preparer.start("/adapters/a", "a@1", 3)
        answer = self.wait(preparer, 3)
        assert answer["state"] == "failed"
        assert answer["error"] == "ValueError: rank 64 is greater than max_lora_rank 32"
        with pytest.raises(ValueError, match="rank 64"):
            preparer.take(self.request())
        assert preparer.prepared() == []

    def test_an_id_is_prepared_or_loaded_once(self, preparer: Any, manager: FakeManager) -> None:
        manager.loaded.add(4)
        preparer.start("/adapters/a", "a@1", 3)
        for engine_id in (3, 4):
            with pytest.raises(ValueError, match=f"engine_id {engine_id} .* loaded or being prepared already"):
                preparer.start("/adapters/a", "a@1", engine_id)
        manager.release.set()

    def test_another_adapter_under_the_same_id_is_refused(self, preparer: Any, manager: FakeManager) -> None:
        manager.release.set()
        preparer.start("/adapters/a", "a@1", 3)
        with pytest.raises(ValueError, match=r"prepared as a@1 from /adapters/a, but is loaded as b@1"):
            preparer.take(self.request(name="b@1"))

    def test_discard(self, preparer: Any, manager: FakeManager) -> None:
        preparer.start("/adapters/a", "a@1", 3)
        assert preparer.discard(3) is True
        assert preparer.discard(3) is False
        manager.release.set()
        assert preparer.take(self.request()) is None


class TestAdapterModules:
    """A packed qkv module with two parts, and a plain one."""

    @pytest.fixture
    def manager(self) -> Any:
        def stacked(parts: int) -> Any:
            a = tuple(torch.zeros(2, 1, 4, 6) for _ in range(parts))
            b = tuple(torch.zeros(2, 1, 5, 4) for _ in range(parts))
            return SimpleNamespace(lora_a_stacked=a, lora_b_stacked=b, tp_size=1)

        ones = torch.ones(4, 6), torch.ones(5, 4)
        lora = SimpleNamespace(
            loras={
                "l.qk_proj": SimpleNamespace(lora_a=[ones[0], ones[0]], lora_b=[ones[1], 0 * ones[1]]),
                "l.o_proj": SimpleNamespace(lora_a=ones[0], lora_b=ones[1]),
            }
        )
        return SimpleNamespace(
            modules={"l.qk_proj": stacked(2), "l.o_proj": stacked(1)},
            packed_modules={"l.qk_proj": ["l.q_proj", "l.k_proj"]},
            lora_index_to_id=[None, None],
            list_adapters=lambda: {9: lora},
        )

    def fill(self, manager: Any, name: str, part: int, slot: int) -> None:
        manager.modules[name].lora_a_stacked[part][slot, 0, 1, 2] = 1
        manager.modules[name].lora_b_stacked[part][slot, 0, 3, 1] = 1

    def test_host_copy_when_not_active(self, manager: Any) -> None:
        from lorahost_kernels.vllm_026 import modules

        assert modules.wrapped_modules(manager) == ["l.k_proj", "l.o_proj", "l.q_proj"]
        assert modules.adapter_modules(manager, 9) == ["l.o_proj", "l.q_proj"]

    def test_slot_when_active(self, manager: Any) -> None:
        from lorahost_kernels.vllm_026 import modules

        manager.lora_index_to_id[1] = 9
        self.fill(manager, "l.qk_proj", 0, slot=1)
        self.fill(manager, "l.o_proj", 0, slot=1)
        assert modules.adapter_modules(manager, 9) == ["l.o_proj", "l.q_proj"]

    def test_slot_that_differs_is_an_error(self, manager: Any) -> None:
        from lorahost_kernels.vllm_026 import modules

        manager.lora_index_to_id[1] = 9
        self.fill(manager, "l.o_proj", 0, slot=1)
        with pytest.raises(RuntimeError, match=r"only in the host copy \['l.q_proj'\]"):
            modules.adapter_modules(manager, 9)
        for module in manager.modules.values():
            module.tp_size = 2
        assert modules.adapter_modules(manager, 9) == ["l.o_proj"]
        self.fill(manager, "l.qk_proj", 1, slot=1)
        with pytest.raises(RuntimeError, match=r"only in the slot \['l.k_proj'\]"):
            modules.adapter_modules(manager, 9)

    def test_unknown_adapter(self, manager: Any) -> None:
        from lorahost_kernels.vllm_026 import modules

        with pytest.raises(KeyError, match=r"engine_id 8 is not loaded; loaded are \[9\]"):
            modules.adapter_modules(manager, 8)
