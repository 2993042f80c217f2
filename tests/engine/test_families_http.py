"""Mixtral and GPT-OSS over HTTP: tokens and log-probabilities equal Hugging Face and PEFT on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.engine import tiny_models
from tests.engine.conftest import READY_S
from tests.engine.test_server import PROMPT, complete, token_ids
from tests.engine.tiny_models import AdapterSpec, Reference
from tests.fakes.running import Server, start

pytestmark = pytest.mark.engine
# dtype, tolerance of a log-probability, gap below which two tokens are tied, and the routing margin below which bf16
# may send a token to another expert than fp32
FAMILIES = {"mixtral": (torch.float32, 1e-3, 1e-3, 0.0), "gpt_oss": (torch.bfloat16, 5e-2, 1e-1, 0.02)}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path, Server]]:
    """A server with a tiny model of one family and one adapter."""
    name: str = request.param
    root = tmp_path_factory.mktemp(name)
    base = tiny_models.build_model(name, root / "base", FAMILIES[name][0])
    tiny_models.build_adapter(base, root / "adapters" / "ada", AdapterSpec("ada", 4, 8), seed=50)
    env = {
        "LORAHOST_ENGINE": "vllm",
        "LORAHOST_BASE_NAME": "tiny",
        "LORAHOST_ADAPTERS_DIR": str(root / "adapters"),
        "SM_VLLM_MODEL": str(base),
        "SM_VLLM_DTYPE": str(FAMILIES[name][0]).removeprefix("torch."),
        "SM_VLLM_MAX_MODEL_LEN": "256",
    }
    server = start(root / "server", env)
    try:
        server.wait_ready(READY_S)
        yield name, root, server
    finally:
        server.stop()


@pytest.mark.parametrize("adapter", [None, "ada"])
def test_tokens_and_logprobs_equal_peft(family: tuple[str, Path, Server], adapter: str | None) -> None:
    name, root, server = family
    _, tolerance, tie, least_margin = FAMILIES[name]
    answer = complete(server, adapter)
    assert answer["model"] == (adapter or "tiny")
    ids = token_ids(answer)
    reference = Reference(root / "base", root / "adapters" / adapter if adapter else None)
    expected, margin = reference.next_logprobs(PROMPT, ids)
    kept = margin >= least_margin
    assert kept.float().mean() >= 0.5
    best = expected.topk(2, dim=-1)
    apart = (best.values[:, 0] - best.values[:, 1] > tie) & kept
    served_ids = torch.tensor(ids)
    assert torch.equal(served_ids[apart], best.indices[apart, 0])
    served = torch.tensor(answer["choices"][0]["logprobs"]["token_logprobs"])
    wanted = expected[torch.arange(len(ids)), served_ids]
    assert (served - wanted)[kept].abs().max() < tolerance
