"""Which modules the adapters in a manager's slots touch, as `graph_nodes` is told."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kernels.lora_manager import Manager, dense_module

from lorahost_kernels.vllm_026 import graph_nodes, module_flags
from lorahost_kernels.vllm_026.graph_nodes import State


def experts(slices: int = 2, ranks: int = 1) -> Any:
    return SimpleNamespace(
        w13_lora_a_stacked=tuple(torch.zeros(4) for _ in range(slices)),
        w2_lora_a_stacked=(torch.zeros(4),),
        moe_config=SimpleNamespace(dp_size=ranks),
    )


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> State:
    found = State(SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setattr(graph_nodes, "state", found)
    return found


def touched(manager: Manager) -> set[str]:
    """Names of the modules all of whose buffers are touched; none may be touched in part."""
    found = set()
    for name, module in manager.modules.items():
        each = {graph_nodes.is_touched(key) for key in module_flags.keys_of(module)}
        assert len(each) == 1, name
        found |= {name} if each == {True} else set()
    return found


def enter(manager: Manager, slot: int, lora_id: int | None) -> set[str]:
    manager.lora_index_to_id[slot] = lora_id
    module_flags.follow_slots(manager)
    return touched(manager)


def test_adapters_come_and_go() -> None:
    modules = {
        "qkv": dense_module(*map(torch.zeros, (4, 4, 4))),
        "router": dense_module(torch.zeros(4)),
        "experts": experts(),
    }
    manager = Manager(modules, {7: {"qkv"}, 8: {"experts"}, 9: {"router", "qkv"}})
    assert touched(manager) == {*modules}, "nothing was said yet"
    assert enter(manager, 0, 7) == {"qkv"}
    assert enter(manager, 2, 8) == {"qkv", "experts"}
    assert enter(manager, 0, 9) == {"router", "qkv", "experts"}
    assert enter(manager, 2, None) == {"router", "qkv"}
    assert enter(manager, 0, None) == set()


def test_every_buffer_of_a_module_is_known_by_its_address() -> None:
    """vLLM may hand over the slices of gate and up in reverse."""
    module = experts()
    assert len(set(module_flags.keys_of(module))) == 3
    assert len(set(module_flags.keys_of(dense_module(*map(torch.zeros, (4, 4, 4)))))) == 3
    assert module_flags.keys_of(torch.nn.Identity()) == []


def test_an_adapter_that_the_manager_does_not_know_touches_everything() -> None:
    manager = Manager({"qkv": dense_module(torch.zeros(4)), "router": dense_module(torch.zeros(4))}, {7: {"qkv"}})
    assert enter(manager, 1, 5) == {"qkv", "router"}


def test_another_managers_modules_stay_as_they_are() -> None:
    first, second = (
        Manager(
            {"qkv": dense_module(torch.zeros(4)), "router": dense_module(torch.zeros(4))}, {7: {"qkv"}, 8: {"router"}}
        )
        for _ in range(2)
    )
    enter(first, 0, 7)
    enter(second, 0, 8)
    enter(second, 0, None)
    assert touched(first) == {"qkv"}


def test_experts_that_serve_other_ranks_are_always_touched() -> None:
    manager = Manager({"qkv": dense_module(torch.zeros(4)), "experts": experts(ranks=2)}, {7: {"qkv"}, 8: set()})
    assert enter(manager, 0, 8) == {"experts"}
    assert enter(manager, 0, None) == {"experts"}


def test_nothing_is_worked_out_where_nothing_is_switched(state: State) -> None:
    state.driver = None
    manager = Manager({"qkv": dense_module(torch.zeros(4))}, {7: set()})
    assert enter(manager, 0, 7) == {"qkv"}
    assert not hasattr(manager, module_flags.TOUCHED)
    # switched on later, all adapters that are in a slot by then are looked at
    state.driver = SimpleNamespace()  # type: ignore[assignment]
    manager.weights[8] = set()
    assert enter(manager, 1, 8) == set()
