"""Checks and times candidates on this GPU."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor

from lorahost_kernels.configs import cdiv
from lorahost_kernels.ops import layer as ops
from lorahost_kernels.ops.common import naive
from lorahost_kernels.ops.common.routing import Routing, slice_columns, unweighted
from lorahost_kernels.ops.down_expand.launch import down_expand
from lorahost_kernels.ops.down_shrink.launch import down_shrink
from lorahost_kernels.ops.expand.launch import expand
from lorahost_kernels.ops.gate_up_expand.launch import gate_up_expand
from lorahost_kernels.ops.gate_up_shrink.launch import gate_up_shrink
from lorahost_kernels.ops.shrink.launch import shrink
from lorahost_kernels.ops.work_list.launch import build_work_list
from lorahost_kernels.tune import cases, fused
from lorahost_kernels.tune.compile import Pair, Problem, problems
from lorahost_kernels.tune.known import rows_of
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tune.timing import Call, bytes_of, calls_for, capture, quick_us, relative_error, replay_us
from lorahost_kernels.tuned.shape import ModelShape

LIMIT = 5e-3  # relative error that a candidate may have, mostly the rounding of the output
CHECK_TOKENS = 96
LEAST_CALLS, MOST_CALLS = 16, 512  # in a graph
MOST_COPIES = 16  # of a batch's activations
MOST_WEIGHTS = 16 * 2**30  # bytes
TURNS = 7
PRODUCTS: dict[str, tuple[Callable[..., None], Callable[..., Tensor], Callable[..., None]]] = {
    "gate_up": (ops.gate_up, gate_up_shrink, gate_up_expand),
    "down": (ops.down, down_shrink, down_expand),
    "dense": (ops.linear, shrink, expand),
    "gate_up_fused": (fused.gate_up, gate_up_shrink, fused.gate_up_expand),
    "down_fused": (fused.down, down_shrink, fused.down_last),
}
Choice = Mapping[str, Pair]  # product -> tiles


class WrongResultError(RuntimeError):
    """A candidate's output is not what it must be."""


@dataclass
class Product:
    """One product of a family: its sizes, the weights of some layers, and the activations that the calls use."""

    problem: Problem
    weights: Sequence[cases.Weights]
    activations: Sequence[tuple[Tensor, ...]]

    @property
    def kind(self) -> str:
        """Its key in PRODUCTS."""
        suffix = "_fused" if self.problem.fused else ""
        return f"{self.problem.half}{suffix}" if self.problem.moe else "dense"

    def layer(self, i: int, routing: Routing) -> cases.Layer:
        """The i-th call's operands; weights and activations take turns."""
        x, y, *out = self.activations[i % len(self.activations)]
        return cases.Layer(x, y, *self.weights[i % len(self.weights)], routing, *out)


class Batch:
    """A family's products at one number of tokens, on many calls' inputs."""

    def __init__(self, products: dict[str, Product], routings: Sequence[Routing], checks: "Checks") -> None:
        self.products, self.routings, self.checks = products, routings, checks
        self.slots = next(iter(products.values())).problem.slots
        self._lists: dict[int, list[Routing]] = {}

    def grouped(self, block_m: int | None) -> Sequence[Routing]:
        """The calls' routings with their work lists."""
        if block_m is None:
            return self.routings
        if block_m not in self._lists:
            self._lists[block_m] = [build_work_list(r, self.slots, block_m) for r in self.routings]
        return self._lists[block_m]

    def calls(self, name: str, pair: Pair) -> list[Call]:
        """The product's calls; grouping is done before."""
        product = self.products[name]
        run = PRODUCTS[product.kind][0]
        return [
            partial(run, *a.operands, configs=pair)
            for a in (product.layer(i, r) for i, r in enumerate(self.grouped(rows_of(pair))))
        ]

    def time(self, name: str, pair: Pair, good: float) -> float:
        """Microseconds of a product, infinite where the tiles don't run; WrongResultError where they are wrong."""
        try:
            self.checks.check(name, pair)
            return quick_us(self.calls(name, pair), good)
        except Exception as failure:
            if not impossible(failure):
                raise
            return float("inf")

    def halves(self, name: str, pair: Pair) -> tuple[float, float]:
        """Microseconds of the shrink alone and of the expand alone."""
        product = self.products[name]
        _, run_shrink, run_expand = PRODUCTS[product.kind]
        layers = [product.layer(i, r) for i, r in enumerate(self.grouped(rows_of(pair)))]
        h = run_shrink(layers[0].x, layers[0].lora_a, layers[0].routing, pair[0])
        h.normal_()
        first = [partial(run_shrink, a.x, a.lora_a, a.routing, pair[0]) for a in layers]
        second = [partial(run_expand, *outputs(a), h, a.lora_b, a.routing, config=pair[1]) for a in layers]
        return quick_us(first), quick_us(second)

    def family_calls(self, choice: Choice) -> list[Call]:
        """All products in turn, for experts with the list's building; a dense layer's list is built once a step."""
        block_m = rows_of(next(iter(choice.values())))
        moe = all(p.problem.moe for p in self.products.values())
        ready = self.routings if moe else self.grouped(block_m)

        def call(i: int, routing: Routing) -> None:
            if moe and block_m is not None:
                routing = build_work_list(routing, self.slots, block_m)
            for name, product in self.products.items():
                a = product.layer(i, routing)
                PRODUCTS[product.kind][0](*a.operands, configs=choice[name])

        return [partial(call, i, r) for i, r in enumerate(ready)]

    def list_time(self, block_m: int | None) -> float:
        """Microseconds of building the work list where each layer does; 0 without one."""
        if block_m is None or not all(p.problem.moe for p in self.products.values()):
            return 0.0
        return quick_us([partial(build_work_list, r, self.slots, block_m) for r in self.routings])

    def turns(self, choices: Sequence[Choice]) -> list[list[float]]:
        """Microseconds of the family, TURNS times in turn for each of the choices."""
        graphs = [capture(self.family_calls(c), warm=1) for c in choices]
        times: list[list[float]] = [[] for _ in choices]
        first = replay_us(graphs[0], 2)[0]
        replays = max(3, min(20, int(6000 / first)))
        for _ in range(TURNS):
            for graph, found in zip(graphs, times, strict=True):
                graph.replay()
                found.append(median(replay_us(graph, replays)) / len(self.routings))
        for graph in graphs:
            graph.reset()
        return times

    def check_whole(self, choice: Choice) -> None:
        """Holds the family's first call at this batch size against the reference. Raises WrongResultError."""
        for name, pair in choice.items():
            a = self.products[name].layer(0, self.grouped(rows_of(pair))[0])
            a.y.normal_()
            compare(self.products[name], a, pair, torch.float32, f"{name} at {a.routing.num_tokens} tokens")


class Checks:
    """Small batches with base rows, stale slots and a disabled adapter, and what a product must make of them."""

    def __init__(self, products: dict[str, Product], routing: Routing) -> None:
        self.products, self.routing = products, routing
        self._bases: dict[str, tuple[cases.Layer, Tensor, Tensor]] = {}
        self._good: set[tuple[str, Pair]] = set()

    def check(self, name: str, pair: Pair) -> None:
        """Raises WrongResultError where the product is not what it must be."""
        if (name, pair) in self._good:
            return
        product = self.products[name]
        if name not in self._bases:
            a = product.layer(0, self.routing)
            if product.problem.fused and product.problem.half == "down" and self.routing.topk_ids is not None:
                # torch's sum behind an expand with a list takes all experts of a token
                a.y[self.routing.topk_ids < 0] = 0
            self._bases[name] = (a, a.y.clone(), reference(product, a, torch.float64))
        a, base, want = self._bases[name]
        a.y.copy_(base)
        rows = rows_of(pair)
        routing = self.routing if rows is None else build_work_list(self.routing, product.problem.slots, rows)
        compare(product, replace(a, routing=routing), pair, torch.float64, name, want)
        self._good.add((name, pair))


def outputs(a: cases.Layer) -> tuple[Tensor, ...]:
    """What an expand writes or adds to."""
    return (a.y,) if a.out is None else (a.out, a.y)


def impossible(failure: Exception) -> bool:
    """Whether the tiles don't fit this GPU or its compiler, which is no error of ours."""
    names = {kind.__name__ for kind in type(failure).__mro__}
    known = names & {"OutOfResources", "CompilationError", "PTXASError", "OutOfMemoryError"}
    texts = ("PassManager::run failed", "Triton Error [CUDA]: invalid argument", "Triton Error [CUDA]: out of memory")
    return bool(known) or (isinstance(failure, RuntimeError) and any(text in str(failure) for text in texts))


def reference(product: Product, a: cases.Layer, compute: torch.dtype) -> Tensor:
    """The product's output, added to the base output before rounding."""
    if product.problem.fused:
        half = product.problem.half
        return fused.reference(a.y, a.x, a.lora_a, a.lora_b, a.routing, half, compute)
    down = product.kind == "down"
    routing = a.routing if down else unweighted(a.routing)
    y = a.y.to(compute, copy=True)
    h = naive.shrink(a.x, a.lora_a, routing, down, compute)
    naive.expand(y, h, a.lora_b, routing, slice_columns(a.lora_b), True, compute)
    return y


def compare(
    product: Product, a: cases.Layer, pair: Pair, compute: torch.dtype, what: str, want: Tensor | None = None
) -> None:
    """Runs a product once and holds it against the reference. Raises WrongResultError above LIMIT."""
    want = reference(product, a, compute) if want is None else want
    if a.out is not None:
        a.out.zero_()
    PRODUCTS[product.kind][0](*a.operands, configs=pair)
    error = relative_error(a.result, want)
    if not error < LIMIT:
        raise WrongResultError(f"{what}: relative error {error:.1e}, limit {LIMIT:.0e}, with {pair}")


class Workbench:
    """The weights of a family's products for some layers; makes batches of any size.

    Raises torch.cuda.OutOfMemoryError where two layers' weights don't fit the GPU.
    """

    def __init__(
        self, shape: ModelShape, family: str, slots: int, rank: int, device: torch.device,
        dtype: torch.dtype = torch.bfloat16, l2_bytes: int = 60 * 2**20,
    ) -> None:  # fmt: skip
        self.shape, self.family, self.slots, self.rank = shape, family, slots, rank
        self.device, self.dtype, self.l2_bytes = device, dtype, l2_bytes
        self.item = torch.empty(0, dtype=dtype).element_size()
        first = self.make_weights()
        sizes = [sum(map(bytes_of, w)) for w in first.values()]
        # even the smallest product's weights must not stay in the L2 while the calls go round
        wanted = min(MOST_CALLS, cdiv(2 * l2_bytes, min(sizes)), MOST_WEIGHTS // sum(sizes))
        made = [first, *(self.make_weights() for _ in range(max(2, wanted) - 1))]
        self.weights = {name: [w[name] for w in made] for name in first}
        self.checks = self.make_checks()

    def make_weights(self) -> dict[str, cases.Weights]:
        """One layer's weights by product."""
        made = (self.rank, self.slots, self.device, self.dtype)
        if self.family != "dense":
            assert self.shape.moe is not None
            return dict(zip(("gate_up", "down"), cases.moe_weights(self.shape.moe, *made), strict=True))
        return {name: cases.dense_weights(m, *made) for name, m in self.shape.modules.items()}

    def problems(self, tokens: int) -> dict[str, Problem]:
        """The products' sizes at a batch size."""
        return problems(self.shape, Place(self.family, tokens, self.slots, self.rank), self.dtype)

    def activations(self, tokens: int) -> dict[str, tuple[Tensor, ...]]:
        """One call's (x, y), of fused products (x, y, out), by product."""
        if self.family != "dense":
            assert self.shape.moe is not None
            make = cases.fused_activations if self.family == "moe_fused" else cases.moe_activations
            made = make(self.shape.moe, tokens, self.device, self.dtype)
            return dict(zip(("gate_up", "down"), made, strict=True))
        modules = self.shape.modules.items()
        return {name: cases.dense_activations(m, tokens, self.device, self.dtype) for name, m in modules}

    def make_checks(self) -> Checks:
        """The checks' inputs."""
        problems = self.problems(CHECK_TOKENS)
        inputs = self.activations(CHECK_TOKENS)
        products = {n: Product(p, self.weights[n][:1], [inputs[n]]) for n, p in problems.items()}
        moe = None if self.family == "dense" else self.shape.moe
        routing = cases.odd_routing(moe, CHECK_TOKENS, self.slots, self.device)
        return Checks(products, fused.by_expert(routing) if self.family == "moe_fused" else routing)

    def batch(self, tokens: int) -> Batch:
        """Inputs of as many calls as together touch more than twice the L2, half uniform, half Zipf."""
        problems = self.problems(tokens)
        inputs = [self.activations(tokens)]
        # weights alone would need hundreds of calls for a prefill of one adapter: seconds a candidate
        each = [(self.touched(p), bytes_of(inputs[0][name])) for name, p in problems.items()]
        wanted = max(calls_for(2 * self.l2_bytes, *touched, MOST_COPIES) for touched in each)
        calls = max(LEAST_CALLS, min(MOST_CALLS, wanted))
        size = min(bytes_of([y]) for _, y, *_ in inputs[0].values())
        copies = max(1, min(calls, cdiv(2 * self.l2_bytes, size), MOST_COPIES))
        inputs += [self.activations(tokens) for _ in range(copies - 1)]
        products = {n: Product(p, self.weights[n], [i[n] for i in inputs]) for n, p in problems.items()}
        moe = None if self.family == "dense" else self.shape.moe
        made = (moe, tokens, self.slots, self.slots, self.device)
        routings = [cases.routing_of(*made, mix) for mix in cases.mixes(calls)]
        if self.family == "moe_fused":
            routings = [fused.by_expert(r) for r in routings]
        return Batch(products, routings, self.checks)

    def touched(self, p: Problem) -> int:
        """Bytes of weights that one call reads about."""
        k, outs = p.sizes
        return max(1, min(p.pairs, p.groups) * self.rank * (k * len(outs) + sum(outs)) * self.item)
