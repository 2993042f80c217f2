"""Every technique that is measured gives right answers, and changes what its name says and nothing else."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from bench import cases
from bench.kernels import LIMIT, Result, error_of
from bench.techniques import TECHNIQUES, Technique, dense_call, line, moe_call

from lorahost_kernels.configs import expand_config, shrink_config
from lorahost_kernels.tune.timing import Spread

CPU = torch.device("cpu")
SLOTS, ADAPTERS, SHAPE = 2, 2, cases.MoeShape(2, 2, 32, 16, 1, rank=16)
BY_PAIRS, BY_LIST = (8, 64), (65536, 64)  # pairs and (slot, expert) pairs of a batch without and with a work list
GROUPED = [t for t in TECHNIQUES if t.block_m is None or t.block_m > 0]
of_all = pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda t: t.name)


@of_all
@pytest.mark.parametrize("tokens", [1, 20])
def test_a_technique_gives_the_layers_product(technique: Technique, tokens: int) -> None:
    if tokens > 1 and technique.block_m is None:
        pytest.skip("many pairs without a work list take the interpreter a minute; the kernel is that of few")
    torch.manual_seed(tokens)
    gate_up, down = cases.moe_layer(SHAPE, tokens, SLOTS, ADAPTERS, CPU, torch.float16)
    call = moe_call(technique, gate_up, down)
    if call is not None:
        assert error_of(call, [(gate_up, False), (down, True)]) < LIMIT
    modules = [cases.dense_layer(32, (32, 16), 16, tokens, SLOTS, ADAPTERS, CPU, torch.float16)]
    call = dense_call(technique, modules)
    if call is not None:
        assert error_of(call, [(modules[0], True)]) < LIMIT


def changed(technique: Technique, sizes: tuple[int, int]) -> set[str] | None:
    """Fields that differ from the defaults."""
    block_m = None if sizes == BY_PAIRS else 32
    usual = (shrink_config(*sizes, 32, 2880, 1, block_m), expand_config(*sizes, 32, 2880, 1, block_m))
    new = technique.change(*usual)
    if new is None:
        return None
    pairs = zip(usual, new, strict=True)
    return {name for a, b in pairs for name, value in asdict(a).items() if value != asdict(b)[name]}


@pytest.mark.parametrize(
    ("name", "by_pairs", "by_list"),
    [
        ("defaults", set(), set()),
        ("without programmatic dependent launch", {"pdl"}, {"pdl"}),
        ("prefetch of B before the wait", None, {"prefetch"}),
        ("split_k 4", {"split_k"}, {"split_k"}),
        ("split_k 2, atomics", {"split_k", "atomic"}, {"split_k", "atomic"}),
        ("ranks 4", {"ranks"}, None),
        ("group 8", {"group"}, {"group"}),
        ("masks where blocks divide", {"masks"}, {"masks"}),
        ("counts and alignments specialised", {"specialize"}, {"specialize"}),
        ("add in a launch of its own", {"fused_add"}, {"fused_add"}),
    ],
)
def test_a_technique_changes_what_its_name_says(name: str, by_pairs: set[str] | None, by_list: set[str] | None) -> None:
    technique = next(t for t in TECHNIQUES if t.name == name)
    assert (changed(technique, BY_PAIRS), changed(technique, BY_LIST)) == (by_pairs, by_list)


@pytest.mark.parametrize("technique", GROUPED, ids=lambda t: t.name)
def test_a_grouping_is_taken_whatever_the_batch(technique: Technique) -> None:
    for tokens in (3, 50):
        gate_up, _ = cases.moe_layer(SHAPE, tokens, SLOTS, ADAPTERS, CPU, torch.float16)
        work = technique.routing(gate_up, 4)().work
        assert (work and work.block_m) == technique.block_m


def test_a_wrong_technique_gets_no_ratio() -> None:
    good, bad = Result(Spread(2.0, 1.9, 2.1), 1e-3), Result(Spread(1.0, 0.9, 1.1), 6e-3)
    assert "0.500 of the defaults" in line(TECHNIQUES[1], Result(bad.time, 1e-3), good)
    assert "RED" in (text := line(TECHNIQUES[1], bad, good))
    assert "of the defaults" not in text
