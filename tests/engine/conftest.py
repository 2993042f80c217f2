"""One real server for the whole folder: a tiny random Qwen3-MoE in fp32, five PEFT adapters, two slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.engine import tiny_models
from tests.engine.tiny_models import AdapterSpec
from tests.fakes.running import Server, start

READY_S = 400.0
NAMES = ("ada", "all", "bob", "cy", "dee")
ENGINE_ENV = {
    "LORAHOST_ENGINE": "vllm",
    "LORAHOST_BASE_NAME": "tiny",
    "SM_VLLM_DTYPE": "float32",
    "SM_VLLM_MAX_LORAS": "2",
    "SM_VLLM_MAX_MODEL_LEN": "512",
    "SM_VLLM_MAX_NUM_SEQS": "16",
    # without both the engine refuses every request with tools
    "SM_VLLM_ENABLE_AUTO_TOOL_CHOICE": "true",
    "SM_VLLM_TOOL_CALL_PARSER": "hermes",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Models:
    """The base model and its adapters on disk."""

    base: Path
    adapters: dict[str, Path]
    successor: Path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Base, five adapters (one on all that PEFT calls linear, the router included), new weights for the first."""
    root = tmp_path_factory.mktemp("tiny")
    base = tiny_models.build_model("qwen3_moe", root / "base", torch.float32)
    ranks = {"ada": 4, "bob": 8, "cy": 2, "dee": 4}
    adapters = {
        name: tiny_models.build_adapter(base, root / "adapters" / name, AdapterSpec(name, rank, 2 * rank), seed)
        for seed, (name, rank) in enumerate(ranks.items(), start=20)
    }
    adapters["all"] = tiny_models.build_all_linear_adapter(base, root / "adapters" / "all", rank=4, seed=30)
    successor = tiny_models.build_adapter(base, root / "successor", AdapterSpec("ada", 4, 8), seed=90)
    return Models(base, adapters, successor)


def start_server(directory: Path, models: Models, **env: str) -> Server:
    """Starts the real server and waits until it is ready."""
    settings = {**ENGINE_ENV, "SM_VLLM_MODEL": str(models.base), **env}
    server = start(directory, settings)
    try:
        server.wait_ready(READY_S)
    except BaseException:
        server.stop()
        raise
    return server


@pytest.fixture(scope="session")
def server(tiny: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server with all five adapters, registered at start."""
    root = next(iter(tiny.adapters.values())).parent
    running = start_server(tmp_path_factory.mktemp("server"), tiny, LORAHOST_ADAPTERS_DIR=str(root))
    yield running
    running.stop()
