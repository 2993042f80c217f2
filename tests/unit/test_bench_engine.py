"""The parts of an engine step that need no engine: weights, adapters, environment, light imports."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from lorahost.adapters.importer import ImportLimits, import_adapter
from lorahost.adapters.layout import ModelLayout
from lorahost.bench import environment, http_server, shapes
from lorahost.bench.loads import Load
from lorahost.bench.point import Point
from lorahost.bench.vllm_026 import weights
from lorahost.bench.vllm_026.adapters import make_adapters
from lorahost.bench.vllm_026.engine import Engine, WrongEngineError, engine_arguments

EXPERTS, TOP_K, HIDDEN = 32, 4, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS)
        packed = torch.zeros(2, 2 * HIDDEN, HIDDEN // 2, dtype=torch.uint8)
        scale = torch.zeros(2, 2 * HIDDEN, HIDDEN // 32, dtype=torch.uint8)
        self.w13_weight = nn.Parameter(packed, requires_grad=False)
        self.w13_weight_scale = nn.Parameter(scale, requires_grad=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(1000, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(3))


@pytest.fixture
def model() -> Model:
    one = Model()
    with torch.no_grad():
        for parameter in one.parameters():
            if parameter.is_floating_point():
                parameter.fill_(1e-3)
    weights.fill(one)
    return one


def test_routing_spreads_over_the_experts(model: Model) -> None:
    x = model.embed_tokens(torch.randint(0, 1000, (16,), generator=torch.Generator().manual_seed(0)))
    touched = []
    for block in model.layers:
        chosen = block.router(block.norm(x)).topk(TOP_K).indices  # type: ignore[operator]
        touched.append(len(chosen.unique()))
    expected = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** 16)
    assert sum(touched) / len(touched) > 0.85 * expected


def test_layers_differ_and_the_same_name_gets_the_same_values(model: Model) -> None:
    first, second = model.layers[0].router.weight, model.layers[1].router.weight  # type: ignore[union-attr]
    assert not torch.equal(first, second)  # type: ignore[arg-type]
    again = Model()
    weights.fill(again)
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_packed_weights_are_random_codes_with_small_finite_scales(model: Model) -> None:
    block = model.layers[0]
    codes = block.w13_weight.flatten()  # type: ignore[union-attr]
    assert len(codes.unique()) == 256  # type: ignore[union-attr]
    exponents = block.w13_weight_scale.to(torch.int32) - 127  # type: ignore[union-attr, operator]
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    rms = (table**2).mean().sqrt() * (2.0 ** (2 * exponents.float())).mean().sqrt()
    # of the size of a freshly initialised layer
    assert 0.5 < float(rms) / (weights.GAIN / HIDDEN**0.5) < 2
    assert 255 not in block.w13_weight_scale  # type: ignore[operator]  # NaN in E8M0


def test_collapsed_weights_leave_the_floats_alone() -> None:
    one = Model()
    before = one.embed_tokens.weight.clone()
    weights.fill(one, spread=False)
    assert torch.equal(one.embed_tokens.weight, before)
    assert len(one.layers[0].w13_weight.unique()) == 256  # type: ignore[union-attr, operator]


def test_unknown_packed_bytes_are_refused() -> None:
    one = nn.Module()
    one.register_parameter("zeros", nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False))
    with pytest.raises(TypeError, match="zeros: no random values are known"):
        weights.fill(one)


@pytest.mark.parametrize("name", ["tiny-gpt-oss", "tiny-qwen3-moe"])
def test_the_server_s_importer_takes_the_adapters(tmp_path: Path, name: str) -> None:
    shape = shapes.SHAPES[name]
    found = make_adapters(tmp_path, shape, 2, 8, ("attention", "experts"), 3)
    assert [path.name for path in found] == ["a0", "a1", "a2"]
    layout = ModelLayout.from_config(shape.hf_config(2), internal_router_lora=True)
    limits = ImportLimits(max_rank=8, max_bytes=1 << 30, dtype="bfloat16")
    report = import_adapter(found[2], tmp_path / "out", layout, limits)
    assert report.rank == 8
    with safe_open(found[0] / "adapter_model.safetensors", "pt") as file:
        sizes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert sizes == shapes.adapter_matrices(shape, 2, 8, ("attention", "experts"))
    first = (found[0] / "adapter_model.safetensors").stat().st_mtime_ns
    make_adapters(tmp_path, shape, 2, 8, ("attention", "experts"), 3)
    assert (found[0] / "adapter_model.safetensors").stat().st_mtime_ns == first


FORKED = """
import os, sys, time, torch
from pathlib import Path
from lorahost.bench.shapes import SHAPES
from lorahost.bench.vllm_026.adapters import make_adapters

torch.set_num_threads(4)
make_adapters(Path(sys.argv[1]), SHAPES["tiny-gpt-oss"], 2, 512, ("attention", "experts"), 1)
if child := os.fork():
    for _ in range(300):
        done, _ = os.waitpid(child, os.WNOHANG)
        if done:
            sys.exit(0)
        time.sleep(0.1)
    os.kill(child, 9)
    sys.exit("the child hangs")
torch.ones(4_000_000).bfloat16()
os._exit(0)
"""


def test_a_process_that_made_adapters_can_be_forked(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(shapes.SHAPES))
def test_configurations_are_json_of_their_layers(tmp_path: Path, name: str) -> None:
    shapes.write_config(shapes.SHAPES[name], 3, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_hidden_layers"] == 3
    assert len(config.get("layer_types", [0] * 3)) == 3


def test_steps_import_nothing_but_the_standard_library_before_the_environment_is_set() -> None:
    code = "import lorahost.bench.engine_point, sys; print([n for n in sys.argv[1:] if n in sys.modules])"
    heavy = ["vllm", "torch", "click", "pydantic", "aiohttp", "numpy", "flask", "matplotlib"]
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


SHOW = """
import json, os, sys
from importlib import metadata
from pathlib import Path
from lorahost.bench import environment
from lorahost.bench.point import Point
extra = {"LORAHOST_SKIP_UNTOUCHED": "on"}
environment.prepare(Point(sys.argv[1], kernels=sys.argv[2], extra=extra), Path(sys.argv[3]))
names = os.environ["VLLM_PLUGINS"].split(",")
points = [p for p in metadata.entry_points(group="vllm.general_plugins") if p.name in names]
loaded = {p.name: p.load().__module__ for p in points}
print(json.dumps({"env": dict(os.environ), "plugins": loaded, "count": len(points)}))
"""


@pytest.mark.parametrize(
    ("path", "kernels", "plugins", "on"),
    [
        ("base", "", {environment.WEIGHTS}, "off"),
        ("stock", "", {environment.WEIGHTS}, "off"),
        ("ours", "", {environment.WEIGHTS, "lorahost"}, "on"),
        ("ours-tuned", "", {environment.WEIGHTS, "lorahost"}, "on"),
        ("lora-base", "", {environment.WEIGHTS, "lorahost"}, "on"),
        ("lora-base", "off", {environment.WEIGHTS, "lorahost"}, "off"),
    ],
)
def test_a_path_decides_on_plugins_kernels_and_configurations(
    tmp_path: Path, path: str, kernels: str, plugins: set[str], on: str
) -> None:
    given = {**os.environ, "LORAHOST_CONFIG_DIR": "mine"}
    line = [sys.executable, "-c", SHOW, path, kernels, str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=True, env=given)
    found = json.loads(done.stdout)
    assert set(found["plugins"]) == plugins
    assert found["count"] == len(plugins)
    assert found["plugins"][environment.WEIGHTS] == "lorahost.bench.vllm_026.weights"
    assert found["env"]["LORAHOST_KERNELS"] == on
    assert found["env"]["LORAHOST_SKIP_UNTOUCHED"] == "on"
    # a process that the engine starts finds them in the same place
    assert str(tmp_path / "plugins") in found["env"]["PYTHONPATH"].split(os.pathsep)
    if path == "ours-tuned":
        assert "LORAHOST_CONFIG_DIR" not in found["env"]
    else:
        assert list(Path(found["env"]["LORAHOST_CONFIG_DIR"]).iterdir()) == []


def test_the_installed_plugin_is_not_declared_twice(tmp_path: Path) -> None:
    assert any(p.name == "lorahost" for p in metadata.entry_points(group=environment.GROUP))
    line = [sys.executable, "-c", SHOW, "ours", "", str(tmp_path)]
    subprocess.run(line, capture_output=True, check=True)
    declared = (tmp_path / "plugins" / "lorahost_bench_plugins-0.dist-info" / "entry_points.txt").read_text()
    assert environment.WEIGHTS in declared
    assert "lorahost =" not in declared


@pytest.mark.parametrize("name", ["LORAHOST_KERNELS", "LORAHOST_CONFIG_DIR", "LORAHOST_PORT"])
def test_variables_that_a_step_sets_itself_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"extra {name}: the step sets these itself"):
        Point("ours", extra={name: "x", "enforce_eager": True})


def test_points_know_who_is_asked() -> None:
    assert Point("base").names == Point("lora-base").names == [""]
    assert Point("stock", adapters=2).names == ["a0", "a1"]


class StandIn:
    """The calls of vLLM's engine that a step makes: one token an output, log-probability and class as told."""

    def __init__(self, wrapper: str = "", logprob: float = -1.0, same: bool = False, tokens: int = 0) -> None:
        self._wrapper = wrapper
        self._logprob = logprob
        self._same = same
        self._tokens = tokens

    async def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        assert method == "lorahost_bench_probe"
        return [{"gpu": "none", "experts": [], "wrapper": self._wrapper, "operations": {}}]

    async def generate(self, prompt: dict[str, list[int]], sampling: int, **_: Any) -> AsyncIterator[Any]:
        token = 1 if self._same else prompt["prompt_token_ids"][0]
        for _i in range(self._tokens or sampling):
            logprobs = [{token: SimpleNamespace(logprob=self._logprob)}]
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token], logprobs=logprobs)])


def engine_of(point: Point, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(Engine, "sampling", lambda self, tokens, **_: tokens)
    return Engine(point, stand_in, {})


OURS, STOCK = "lorahost_kernels.vllm_026.gpu_punica.GpuPunicaWrapper", "vllm.lora.punica_wrapper.punica_gpu.X"


@pytest.mark.parametrize(
    ("path", "kernels", "wrapper", "right"),
    [
        ("base", "", "", True), ("base", "", STOCK, False), ("stock", "", STOCK, True), ("stock", "", OURS, False),
        ("stock", "", "", False), ("ours", "", OURS, True), ("ours", "", STOCK, False), ("ours-tuned", "", "", False),
        ("lora-base", "", OURS, True), ("lora-base", "off", STOCK, True), ("lora-base", "off", OURS, False),
    ],
)  # fmt: skip
def test_a_step_refuses_an_engine_that_runs_something_else(
    path: Any, kernels: Any, wrapper: str, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(Point(path, kernels=kernels), StandIn(wrapper), monkeypatch)
    if right:
        assert asyncio.run(engine.probe())["wrapper"] == wrapper
    else:
        with pytest.raises(WrongEngineError, match=f"path {path} wants"):
            asyncio.run(engine.probe())


def test_a_step_refuses_dead_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(engine_of(Point("base"), StandIn(), monkeypatch).check())
    for value in (float("nan"), float("-inf")):
        with pytest.raises(WrongEngineError, match="has log-probability"):
            asyncio.run(engine_of(Point("base"), StandIn(logprob=value), monkeypatch).check())
    with pytest.raises(WrongEngineError, match="four different prompts are all answered"):
        asyncio.run(engine_of(Point("base"), StandIn(same=True), monkeypatch).check())
    asyncio.run(engine_of(Point("base", weights="collapsed"), StandIn(same=True), monkeypatch).check())


def test_a_request_of_another_length_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    point = Point("base", input=4, output=6)
    [record] = asyncio.run(engine_of(point, StandIn(), monkeypatch).round(Load(concurrency=1), 1, 0))
    assert (record.tokens, len(record.at), record.error, record.prompt_tokens) == (6, 6, "", 4)
    [short] = asyncio.run(engine_of(point, StandIn(tokens=5), monkeypatch).round(Load(concurrency=1), 1, 0))
    assert short.error == "5 tokens instead of 6"


def test_the_server_gets_the_same_engine_arguments() -> None:
    point = Point("ours", slots=4, extra={"enforce_eager": True, "lora_target_modules": ["q_proj"]}, spec="ngram")
    server = http_server.server_environment(point, Path("/m"), 1, Path("/w"))
    own = engine_arguments(point, Path("/m"))
    names = ("load_format", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "seed")
    for name in (*names, "moe_backend", "max_loras", "max_lora_rank", "speculative_config"):
        value = own[name] if isinstance(own[name], str) else json.dumps(own[name])
        assert server["SM_VLLM_" + name.upper()] == value, name
    assert own["enable_prefix_caching"] is False
    assert server["SM_VLLM_NO_ENABLE_PREFIX_CACHING"] == server["SM_VLLM_ENFORCE_EAGER"] == "true"
    assert server["SM_VLLM_LORA_TARGET_MODULES"] == '["q_proj"]'
    switched = Point("ours", extra={"LORAHOST_SKIP_UNTOUCHED": "on", "enforce_eager": True})
    assert http_server.server_environment(switched, Path("/m"), 1, Path("/w"))["LORAHOST_SKIP_UNTOUCHED"] == "on"
    assert not [name for name in engine_arguments(switched, Path("/m")) if name.startswith("LORAHOST_")]
    assert "LORAHOST_SKIP_UNTOUCHED" in str(switched.row()["extra"]), "two engines must differ in their rows"
    with pytest.raises(ValueError, match="extra async_scheduling: false"):
        http_server.server_environment(Point("ours", extra={"async_scheduling": False}), Path("/m"), 1, Path("/w"))
    assert "SM_VLLM_MAX_LORAS" not in http_server.server_environment(Point("base"), Path("/m"), 1, Path("/w"))
