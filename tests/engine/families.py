"""A running CPU engine with a tiny model, its adapters, and their references."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.tiny_models import AdapterSpec, Reference, build_adapter, build_model

from lorahost.adapters.importer import ImportLimits, import_adapter
from lorahost.adapters.layout import ModelLayout

SPECS = (
    AdapterSpec("full", rank=8, alpha=16),
    AdapterSpec("experts", rank=4, alpha=8, attention=False),
    AdapterSpec("attention", rank=8, alpha=4, experts=False),
)
PROMPTS = ([72, 101, 108, 108, 111], list(range(40, 60)), [(7 * i) % 256 for i in range(150)])
NEW_TOKENS = 8


@dataclass
class Family:
    """One running engine with its adapters and references."""

    name: str
    tolerance: float
    routing_tie: float
    engine: Any
    requests: dict[str | None, Any]
    references: dict[str | None, Reference]
    directory: Path
    modules: dict[str, list[str]]

    def generate(self, jobs: list[tuple[str | None, list[int]]]) -> list[Any]:
        """Greedy completions of (adapter, prompt) pairs in one batch."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=5, ignore_eos=True)
        outputs = self.engine.generate(
            [{"prompt_token_ids": prompt} for _, prompt in jobs],
            params,
            lora_request=[self.requests[adapter] for adapter, _ in jobs],
            use_tqdm=False,
        )
        return [output.outputs[0] for output in outputs]

    def check(self, jobs: list[tuple[str | None, list[int]]]) -> None:
        """Runs the jobs as one batch and compares each with its reference; few tokens may be routing ties."""
        outputs = self.generate(jobs)
        ties = sum(
            self.compare(adapter, prompt, output) for (adapter, prompt), output in zip(jobs, outputs, strict=True)
        )
        assert ties <= 0.25 * NEW_TOKENS * len(jobs)

    def compare(self, adapter: str | None, prompt: list[int], output: Any) -> int:
        """Every listed log-probability is within tolerance, and the chosen token is a best one.

        Tokens whose experts are a tie, within the rounding of the dtype, are left out and counted.
        """
        reference, margin = self.references[adapter].next_logprobs(prompt, output.token_ids)
        tied = (margin < self.routing_tie).tolist()
        for position, (token, listed) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
            if tied[position]:
                continue
            where = f"{self.name}, adapter {adapter}, prompt of {len(prompt)}, token {position}"
            for candidate, entry in listed.items():
                expected = reference[position, candidate].item()
                assert entry.logprob == pytest.approx(expected, abs=self.tolerance), where
            gap = (reference[position].max() - reference[position, token]).item()
            assert gap <= 2 * self.tolerance, f"{where}: {token} is {gap} below the best"
        return sum(tied)

    def rpc(self, method: str, *args: Any) -> Any:
        """The single worker's answer."""
        (answer,) = self.engine.collective_rpc(method, args=args)
        return answer

    def prepare(self, path: Path, name: str, engine_id: int) -> dict[str, Any]:
        """Prepares an adapter in the worker and waits until that is over."""
        self.rpc("lorahost_prepare_adapter", str(path), name, engine_id)
        while (answer := self.rpc("lorahost_prepare_poll", engine_id))["state"] == "reading":
            time.sleep(0.02)
        return answer


def start(family: str, directory: Path, *, dtype: torch.dtype, max_loras: int, tolerance: float) -> Family:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    base = build_model(family, directory / "base", dtype)
    layout = ModelLayout.from_config(json.loads((base / "config.json").read_text()))
    limits = ImportLimits(max_rank=8, max_bytes=10**8, dtype="bfloat16" if dtype == torch.bfloat16 else "float32")
    modules = {}
    requests: dict[str | None, Any] = {None: None}
    references: dict[str | None, Reference] = {None: Reference(base)}
    for engine_id, spec in enumerate(SPECS, start=1):
        source = build_adapter(base, directory / "peft" / spec.name, spec, seed=engine_id)
        path = directory / "adapters" / spec.name
        path.parent.mkdir(exist_ok=True)
        modules[spec.name] = sorted(import_adapter(source, path, layout, limits).modules)
        requests[spec.name] = LoRARequest(spec.name, engine_id, str(path))
        references[spec.name] = Reference(base, source)
    engine = LLM(
        str(base),
        dtype=str(dtype).removeprefix("torch."),
        enable_lora=True,
        max_loras=max_loras,
        max_cpu_loras=6,
        max_lora_rank=8,
        max_model_len=256,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        enforce_eager=True,
        worker_extension_cls="lorahost_kernels.vllm_026.worker.WorkerExtension",
    )
    # bf16 rounds router logits to about 0.02 here; fp32 leaves no ties.
    routing_tie = 0.02 if dtype == torch.bfloat16 else 0.0
    return Family(family, tolerance, routing_tie, engine, requests, references, directory, modules)


def stop(family: Family) -> None:
    family.engine.llm_engine.engine_core.shutdown()


def add(family: Family, path: Path, name: str, engine_id: int) -> Any:
    """Loads an adapter into the engine and returns its request."""
    from vllm.lora.request import LoRARequest

    request = LoRARequest(name, engine_id, str(path))
    assert family.engine.llm_engine.add_lora(request)
    return request
