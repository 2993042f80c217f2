"""Answers of two engines to the same prompts: how far apart they are; standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# a token and the highest log-probabilities at its place, by token id
Token = tuple[int, dict[int, float]]
Answers = Mapping[str, Sequence[Token]]
TOKENS = 6
TOP = 8
LENGTHS = (3, 17, 100, 700, 1600)
GAP = 0.1


@dataclass
class Difference:
    """Engine against reference. A near tie is another token whose log-probability is within `GAP` of the best."""

    questions: int = 0
    equal: int = 0
    ties: int = 0
    worst: float = 0.0
    worst_at: str = ""
    differing: list[str] = field(default_factory=list)
    unasked: int = 0


def read(found: Mapping[str, Sequence[tuple[int, Mapping[str, float]]]]) -> dict[str, list[Token]]:
    """Answers as JSON brings them: its keys are strings."""
    return {tag: [(token, {int(i): v for i, v in near.items()}) for token, near in a] for tag, a in found.items()}


def difference(reference: Answers, other: Answers) -> Difference:
    """Compares what both were asked, each answer up to and with its first other token: later ones answer other texts.

    A log-probability that is not a number is an infinite difference.
    """
    found = Difference(unasked=len(reference.keys() ^ other.keys()))
    for tag in reference:
        if tag not in other:
            continue
        found.questions += 1
        if len(reference[tag]) != len(other[tag]):
            found.differing.append(f"{tag}: {len(other[tag])} tokens instead of {len(reference[tag])}")
        for place, (mine, theirs) in enumerate(zip(reference[tag], other[tag], strict=False), 1):
            apart = _apart(mine[1], theirs[1])
            if apart > found.worst:
                found.worst, found.worst_at = apart, f"{tag}, token {place}"
            if mine[0] != theirs[0]:
                gap = _gap(mine, theirs[0])
                if gap <= GAP:
                    found.ties += 1
                else:
                    text = f"{tag}: token {place} is {theirs[0]} instead of {mine[0]}"
                    found.differing.append(f"{text}, {gap:.3f} below it in the reference")
                break
        else:
            found.equal += len(reference[tag]) == len(other[tag])
    return found


def _apart(a: Mapping[int, float], b: Mapping[int, float]) -> float:
    """The largest difference of ids that both have; infinite if they have none in common."""
    both = [abs(a[i] - b[i]) for i in a if i in b]
    return max((math.inf if math.isnan(value) else value for value in both), default=math.inf)


def _gap(mine: Token, other: int) -> float:
    """How far the other token is below the chosen one; at least so far if it is not among the highest."""
    token, near = mine
    gap = near[token] - near.get(other, min(near.values()))
    return math.inf if math.isnan(gap) else gap


def text(reference: str, name: str, d: Difference) -> str:
    """A line, and one more for each answer that differs by more than a near tie."""
    counts = f"{d.questions} answers, {d.equal} equal, {d.ties} near ties (gap <= {GAP}), {len(d.differing)} differ"
    worst = f"worst log-probability difference {d.worst:.4f}" + (f" ({d.worst_at})" if d.worst_at else "")
    only = f"; {d.unasked} asked of one side only" if d.unasked else ""
    return "\n".join([f"{name} against {reference}: {counts}; {worst}{only}", *(f"  {x}" for x in d.differing)])
