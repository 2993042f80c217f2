"""Launches a kernel again without asking Triton what it is: outside CUDA graphs that is a dozen launches a layer.

Triton binds and specialises every argument of every launch, about 50 here. A launch whose key was seen before goes to
the compiled kernel at once, with the constants of the first time and the pointers of this time.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import triton
from torch import Tensor

MAX_PLANS = 16384


class Constants(NamedTuple):
    """What a launch takes besides pointers: programs of the grid, arguments by name, Triton's options.

    specialize: as `ShrinkConfig.specialize`.
    """

    programs: int
    args: dict[str, Any]
    options: dict[str, Any]
    specialize: bool = False


class Plan(NamedTuple):
    """A compiled kernel and what follows its pointers."""

    compiled: Any
    programs: int
    tail: list[Any]


_plans: dict[Hashable, Plan] = {}


@functools.cache
def specialized(kernel: Any) -> Any:
    """The kernel without its do_not_specialize; the interpreter's, which compiles nothing, as it is."""
    return triton.jit(kernel.fn) if isinstance(kernel, triton.JITFunction) else kernel


def launch(kernel: Any, key: Hashable, pointers: tuple[Tensor, ...], constants: Callable[[], Constants]) -> None:
    """Launches `kernel` with `pointers` as its first arguments.

    key: all that `constants` depends on, and the pointers' dtypes; alignments are looked at here.
    """
    whole = (id(kernel), key, *[tensor.data_ptr() & 15 for tensor in pointers])
    plan = _plans.get(whole)
    if plan is not None:
        plan.compiled[(plan.programs, 1, 1)](*pointers, *plan.tail)
        return
    programs, args, options, specialize = constants()
    if not programs:
        return
    kernel = specialized(kernel) if specialize else kernel
    compiled = kernel[(programs,)](*pointers, **args, **options)
    # the interpreter compiles nothing
    if compiled is not None:
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[whole] = Plan(compiled, programs, [args[name] for name in kernel.arg_names[len(pointers) :]])
