"""Makes the cases of `bench.parity`: tiny models, normalised adapters, prompts, and what Hugging Face says to them.

usage: python -m bench.parity_cases DIR [CASE ...]

The reference is Hugging Face with PEFT in fp32. Prompts are chosen so that rounding to bf16 can't change what they
mean: no token is a tie between two experts or, among those generated, between two tokens.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.parity_models import MODELS, VOCABULARY, Adapter, Model, Reference, build_adapter, build_model
from lorahost.adapters.importer import ImportLimits, import_adapter
from lorahost.adapters.layout import ModelLayout

LENGTHS = (1, 7, 40, 150)
NEW_TOKENS = 8
LISTED = 20
MARGIN = 0.08  # least distance of the router logits of the last expert chosen and the first left out
GAP = 0.12  # least distance of the two best tokens' log-probabilities
CANDIDATES = 16
ROUNDS = 40
EFFECT = 0.3


class Search:
    """Finds prompts for one adapter."""

    def __init__(self, reference: Reference, seed: int) -> None:
        self._reference = reference
        self._generator = torch.Generator().manual_seed(seed)

    def prompt(self, length: int) -> tuple[list[int], float]:
        """A prompt and the least of its margins and gaps, each relative to what is wanted; 1 or more is safe."""
        ids = self._tokens(length)
        for _ in range(2 * length):
            _, margin = self._reference(ids[None])
            bad = (margin[0] < MARGIN).nonzero()
            if not len(bad) or (first := int(bad[0])) == length - 1:
                break
            tried = ids.repeat(CANDIDATES, 1)
            tried[:, first] = self._tokens(CANDIDATES)
            _, margins = self._reference(tried[:, : first + 1])
            ids = tried[int(margins[:, first].argmax())]
        return self._last_token(ids)

    def _last_token(self, ids: torch.Tensor) -> tuple[list[int], float]:
        best, safest = ids, -1.0
        order = torch.randperm(VOCABULARY, generator=self._generator)
        for last in torch.split(order, CANDIDATES)[:ROUNDS]:
            tried = ids.repeat(len(last), 1)
            tried[:, -1] = last
            whole = tried
            for _ in range(NEW_TOKENS):
                logprobs, margins = self._reference(whole)
                whole = torch.cat([whole, logprobs[:, -1].argmax(-1, keepdim=True)], 1)
            top = logprobs[:, len(ids) - 1 :].topk(2).values
            safety = torch.minimum(margins.amin(1) / MARGIN, (top[..., 0] - top[..., 1]).amin(1) / GAP)
            if float(safety.max()) > safest:
                best, safest = tried[int(safety.argmax())], float(safety.max())
            if safest >= 1:
                break
        return best.tolist(), safest

    def _tokens(self, count: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (count,), generator=self._generator)


def expected(reference: Reference, base: Reference, prompt: list[int]) -> dict[str, Any]:
    """The greedy tokens, the best tokens' log-probabilities at each, and the base model's of those of the first."""
    ids = list(prompt)
    steps = []
    for _ in range(NEW_TOKENS):
        logprobs, _ = reference(torch.tensor([ids]))
        top = logprobs[0, -1].topk(LISTED)
        steps.append({"ids": top.indices.tolist(), "logprobs": [round(v, 4) for v in top.values.tolist()]})
        ids.append(steps[-1]["ids"][0])
    before = base(torch.tensor([prompt]))[0][0, -1, steps[0]["ids"]]
    return {"prompt": prompt, "steps": steps, "base": [round(v, 4) for v in before.tolist()]}


def effect(jobs: list[dict[str, Any]]) -> float:
    """How much an adapter changes any log-probability of its jobs' first tokens."""
    changes: list[float] = [
        abs(a - b) for job in jobs for a, b in zip(job["steps"][0]["logprobs"], job["base"], strict=True)
    ]
    return max(changes)


def make_case(name: str, model: Model, target: Path, seed: int) -> None:
    """Writes the case `name` to `target`."""
    base = target / "model"
    build_model(model, base, seed)
    config = json.loads((base / "config.json").read_text())
    layout = ModelLayout.from_config(config, internal_router_lora=True)
    limits = ImportLimits(max_rank=16, max_bytes=10**8, dtype="bfloat16")
    plain = Reference(model, base)
    jobs = _jobs(None, plain, plain, seed)
    with tempfile.TemporaryDirectory() as scratch:
        for number, adapter in enumerate(model.adapters, start=1):
            source = Path(scratch) / adapter.name
            build_adapter(model, base, source, adapter, seed + number)
            report = import_adapter(source, target / "adapters" / adapter.name, layout, limits)
            made = _jobs(adapter, Reference(model, base, adapter, source), plain, seed + number)
            change = effect(made)
            print(f"{name} {adapter.name}: rank {report.rank}, {report.source_format}, "
                  f"{len(report.modules)} modules, changes up to {change:.2f}", flush=True)  # fmt: skip
            if change < EFFECT:
                raise RuntimeError(f"{name}: adapter {adapter.name} changes log-probabilities by {change}, too little")
            jobs += made
    engine = {**model.engine, "max_loras": len(model.adapters), "lora_target_modules": list(layout.engine_suffixes)}
    (target / "case.json").write_text(json.dumps({"engine": engine, "mxfp4": model.mxfp4}))
    (target / "expected.json").write_text(json.dumps(jobs))


def _jobs(adapter: Adapter | None, reference: Reference, base: Reference, seed: int) -> list[dict[str, Any]]:
    search = Search(reference, seed)
    jobs = []
    for length in LENGTHS:
        prompt, safety = search.prompt(length)
        if safety < 1:
            print(f"  {length} tokens: only {safety:.2f} of the distances wanted", flush=True)
        jobs.append({"adapter": adapter and adapter.name, **expected(reference, base, prompt)})
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(MODELS))
    args = parser.parse_args()
    for number, (name, model) in enumerate(MODELS.items()):
        if not args.cases or name in args.cases:
            shutil.rmtree(args.target / name, ignore_errors=True)
            make_case(name, model, args.target / name, 100 * number)


if __name__ == "__main__":
    main()
