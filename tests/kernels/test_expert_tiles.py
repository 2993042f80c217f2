"""Which calls of triton_kernels' GEMM get their busy programs first; its own modules are on GPU machines only."""

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lorahost_kernels.configs import cdiv
from lorahost_kernels.ops.expert_order.launch import count_tiles
from lorahost_kernels.vllm_026 import expert_tiles, patching

EXPERTS = 32


@dataclass
class OptFlags:
    """As in triton_kernels, as far as it is read."""

    block_m: int = 16
    fused_scatter: bool = True
    is_persistent: bool = False
    xcd_swizzle: int = 1


@pytest.fixture
def matmul(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for triton_kernels.matmul_ogs whose options are its first argument."""
    modules = {name: ModuleType(name) for name in ("triton_kernels", expert_tiles.MODULE)}
    options: Any = ModuleType(f"{expert_tiles.MODULE}_details.opt_flags")
    options.OptFlags = OptFlags
    modules[options.__name__] = options
    modules[f"{expert_tiles.MODULE}_details"] = ModuleType(f"{expert_tiles.MODULE}_details")
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(patching, "_originals", {})
    found: Any = modules[expert_tiles.MODULE]
    found.make_opt_flags = options_given
    return modules[expert_tiles.MODULE]


def options_given(
    out_dtype: Any,
    lhs_dtype: Any,
    rhs_dtype: Any,
    precision_config: Any,
    m: int,
    n: int,
    k: int,
    routing_data: Any,
    can_use_persistent_tma: bool,
    can_use_fused_scatter: bool,
    epilogue_effective_itemsize: Any,
) -> Any:
    """Arguments as in the triton_kernels that vLLM carries."""
    return out_dtype


def chosen(matmul: Any, flags: OptFlags, rows: int = 64, routing: Any = True) -> OptFlags:
    """What the GEMM is launched with: (out, x, w, precision, rows, n, k, routing, tma, scatter, itemsize)."""
    if routing is True:
        routing = SimpleNamespace(expt_data=object(), n_expts_tot=EXPERTS)
    result: OptFlags = matmul.make_opt_flags(flags, None, None, None, rows, 2880, 2880, routing, False, True, None)
    return result


def test_the_second_gemm_of_a_small_batch_has_its_busy_programs_first(matmul: ModuleType) -> None:
    assert expert_tiles.apply_patches() == ""
    assert chosen(matmul, OptFlags()) == OptFlags(xcd_swizzle=expert_tiles.XCD_SWIZZLE)
    assert expert_tiles.XCD_SWIZZLE > 1, "at 1 the option is off"


@pytest.mark.parametrize(
    ("flags", "rows", "routing"),
    [
        (OptFlags(fused_scatter=False), 64, True),
        (OptFlags(block_m=32), 2048, True),
        (OptFlags(is_persistent=True), 64, True),
        (OptFlags(), EXPERTS - 1, True),
        (OptFlags(), 512, True),
        (OptFlags(), 64, None),
        (OptFlags(), 64, SimpleNamespace(expt_data=None, n_expts_tot=EXPERTS)),
    ],
)
def test_others_are_launched_as_before(matmul: ModuleType, flags: OptFlags, rows: int, routing: Any) -> None:
    assert expert_tiles.apply_patches() == ""
    assert chosen(matmul, flags, rows, routing) == flags


@pytest.mark.parametrize("experts", [8, 32, 128])
def test_rows_without_an_expert_are_cleared_by_the_busy_or_the_idle_programs(experts: int) -> None:
    found = [n for n in range(1, 4096) if expert_tiles.has_idle_programs(n, experts, 16)]
    assert found, "no size gains"
    for pairs in found:
        tiles, rows = count_tiles(pairs, experts, 16), cdiv(pairs, 16)
        # each kind clears as many tiles' rows as it has tiles, from the first on
        assert all(max(busy, tiles - busy) >= rows for busy in range(tiles + 1))


def test_a_package_that_is_not_there_is_said() -> None:
    assert "triton_kernels" in expert_tiles.apply_patches()


@pytest.mark.parametrize("missing", ["make_opt_flags", "xcd_swizzle", "OptFlags"])
def test_another_version_is_said_and_left_alone(
    missing: str, matmul: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = sys.modules[f"{expert_tiles.MODULE}_details.opt_flags"]
    if missing == "make_opt_flags":
        monkeypatch.delattr(matmul, missing)
    elif missing == "OptFlags":
        monkeypatch.delattr(options, missing)
    else:
        monkeypatch.setattr(options, "OptFlags", dataclass(type("OptFlags", (), {"__annotations__": {"block_m": int}})))
    before = dict(vars(matmul))
    assert missing in expert_tiles.apply_patches()
    assert vars(matmul) == before


def test_arguments_in_other_places_are_said_and_left_alone(matmul: Any) -> None:
    def newer(out_dtype: Any, lhs_dtype: Any, rhs_dtype: Any, precision_config: Any, batch_size: int, m: int, n: int,
              k: int, routing_data: Any) -> Any:  # fmt: skip
        return out_dtype

    matmul.make_opt_flags = newer
    assert "batch_size" in expert_tiles.apply_patches()
    assert matmul.make_opt_flags is newer


def test_a_second_call_changes_nothing(matmul: ModuleType) -> None:
    assert [expert_tiles.apply_patches() for _ in range(2)] == ["", ""]
    assert chosen(matmul, OptFlags()) == OptFlags(xcd_swizzle=expert_tiles.XCD_SWIZZLE)


def test_the_benchmark_measures_what_the_plugin_leaves_out(matmul: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from bench.expert_tiles import everywhere

    for name in ("second_gemm", "has_idle_programs"):
        monkeypatch.setattr(expert_tiles, name, getattr(expert_tiles, name))
    assert expert_tiles.apply_patches() == ""
    everywhere()
    for flags, rows in ((OptFlags(fused_scatter=False), 64), (OptFlags(), 4), (OptFlags(), 512)):
        assert chosen(matmul, flags, rows).xcd_swizzle == expert_tiles.XCD_SWIZZLE
