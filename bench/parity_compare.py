"""What an engine answered against what was expected."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TOLERANCE = 5e-2  # of a log-probability
CLOSE = 0.1  # two best tokens nearer than this may swap
EFFECT = 0.2  # an adapter that changes less proves nothing
COMPARED = 0.9  # least share of the tokens


@dataclass
class Comparison:
    """What became of the jobs of one adapter."""

    worst: float = 0.0
    where: str = ""
    compared: int = 0
    equal: int = 0
    tokens: int = 0
    effect: float = 0.0
    problems: list[str] = field(default_factory=list)

    def add(self, job: Mapping[str, Any], answer: Sequence[tuple[int, Mapping[int, float]]], mode: str) -> None:
        """Compares one answer with what is expected, up to the first token that differs."""
        where = f"{mode}, prompt of {len(job['prompt'])}"
        self.tokens += len(job["steps"])
        if len(answer) != len(job["steps"]):
            self.problems.append(f"{where}: {len(answer)} tokens instead of {len(job['steps'])}")
        first = dict(zip(job["steps"][0]["ids"], job["base"], strict=True))
        self.effect = max([self.effect, *(abs(v - first[t]) for t, v in answer[0][1].items() if t in first)])
        for number, (step, (token, listed)) in enumerate(zip(job["steps"], answer, strict=False)):
            difference = step_difference(step, listed)
            self.compared += 1
            if difference > self.worst:
                self.worst, self.where = difference, f"{where}, token {number}"
            if token != step["ids"][0]:
                gap = step["logprobs"][0] - step["logprobs"][1]
                if gap > CLOSE:
                    best = step["ids"][0]
                    self.problems.append(f"{where}: token {number} is {token} where {best} leads by {gap:.2f}")
                return
            self.equal += 1

    def finish(self, has_adapter: bool) -> None:
        """Adds what speaks against the whole."""
        if self.worst > TOLERANCE:
            self.problems.append(f"log-probabilities differ by {self.worst:.4f} ({self.where})")
        if self.compared < COMPARED * self.tokens:
            self.problems.append(f"only {self.compared} of {self.tokens} tokens could be compared")
        if has_adapter and not self.effect > EFFECT:
            self.problems.append(f"the adapter changes no log-probability by more than {self.effect:.3f}")


def step_difference(step: Mapping[str, Any], listed: Mapping[int, float]) -> float:
    """Worst difference of one step's log-probabilities; infinity when one is NaN.

    Both sides list their best tokens. One that only the engine lists is at most as likely as the last expected; the
    engine must list the best that are expected, down to where the tolerance may have swapped them for others.
    """
    expected = dict(zip(step["ids"], step["logprobs"], strict=True))
    floor, lowest = min(expected.values()), min(listed.values())
    found = [abs(value - expected[t]) if t in expected else max(0.0, value - floor) for t, value in listed.items()]
    found += [max(0.0, value - lowest) for t, value in expected.items() if t not in listed]
    return math.inf if any(math.isnan(value) for value in [*listed.values(), *found]) else max(found)


def compare(
    case: str, engine: str, jobs: Sequence[Mapping[str, Any]], served: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """One row per adapter, and one for the base model."""
    found: dict[str | None, Comparison] = {}
    for mode, answers in served["answers"].items():
        for job, answer in zip(jobs, answers, strict=True):
            found.setdefault(job["adapter"], Comparison()).add(job, answer, mode)
    rows = []
    for adapter, result in found.items():
        result.finish(adapter is not None)
        if "ngram" in engine and not served["drafts"]:
            result.problems.append("nothing was drafted, so speculative decoding was not tried")
        rows.append(row(case, engine, adapter or "base", result.problems, result, served["drafts"]))
    return rows


def row(
    case: str,
    engine: str,
    adapter: str,
    problems: list[str],
    result: Comparison | None = None,
    drafts: float | None = None,
) -> dict[str, Any]:
    """What goes to the file."""
    result = result or Comparison()
    return {
        "case": case, "engine": engine, "adapter": adapter, "passed": not problems, "worst": round(result.worst, 4),
        "where": result.where, "compared": result.compared, "equal": result.equal, "tokens": result.tokens,
        "effect": round(result.effect, 3), "drafts": drafts, "problems": problems,
    }  # fmt: skip


def line(result: Mapping[str, Any]) -> str:
    """A row for people."""
    text = (
        f"{'PASS' if result['passed'] else 'FAIL'} {result['case']:14} {result['engine']:13} {result['adapter']:11}"
        f" worst {result['worst']:.4f}  equal {result['equal']}/{result['tokens']}  effect {result['effect']:.2f}"
    )
    return "\n".join([text, *(f"     {problem}" for problem in result["problems"][:5])])
