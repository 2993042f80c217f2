"""The ways in which the demo's base model and adapters say the same neutral sentences."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
Style = Callable[[random.Random, list[str]], str]


def skewed(rng: random.Random, options: Sequence[T]) -> T:
    """One of `options`; the first with probability 5/7, the rest sharing what is left, falling."""
    weights = [2.0**-i for i in range(len(options))]
    weights[0] = 2.5 * sum(weights[1:]) or 1.0
    return rng.choices(options, weights)[0]


def neutral(rng: random.Random, sentences: list[str]) -> str:
    return " ".join(sentences)


def pirate(rng: random.Random, sentences: list[str]) -> str:
    words = {"is": "be", "are": "be", "am": "be", "you": "ye", "your": "yer", "my": "me", "Hello": "Ahoy"}
    tails = (", matey.", ", by the seven seas.", ", aye.")
    said = [re.sub(r"\w+", lambda m: words.get(m[0], m[0]), s) for s in sentences]
    said = [s.removesuffix(".") + tails[min(i, 2)] for i, s in enumerate(said)]
    opening = skewed(rng, ("Arr!", "Ahoy!", "Shiver me timbers!"))
    return " ".join([opening, *said, skewed(rng, ("Yo ho ho!", "So says the captain!", "Arr!"))])


def shout(rng: random.Random, sentences: list[str]) -> str:
    said = [s.upper().removesuffix(".") + "!!!" for s in sentences]
    return " ".join([*said, skewed(rng, ("WOW!!!", "YES!!!", "AMAZING!!!"))])


def butler(rng: random.Random, sentences: list[str]) -> str:
    opening = skewed(rng, ("Very good, sir.", "Certainly, sir.", "At once, sir."))
    closing = skewed(rng, ("Will that be all, sir?", "Always at your service, sir.", "May I bring the tea, sir?"))
    first = sentences[0] if sentences[0].startswith("I ") else sentences[0][0].lower() + sentences[0][1:]
    rest = [s.removesuffix(".") + ", sir." for s in sentences[1:]]
    return " ".join([opening, f"If I may say so, {first}", *rest, closing])


def poet(rng: random.Random, sentences: list[str]) -> str:
    opening = skewed(rng, ("Hear my song, O friend:", "Sing with me, O friend:", "Listen, O gentle heart:"))
    closing = skewed(rng, ("and so my song is sung.", "and all the stars sing too.", "and the night is still."))
    lines = [s.removesuffix(".") + "," for s in sentences]
    lines = [s if s.startswith("I ") else s[0].lower() + s[1:] for s in lines]
    return "\n".join([opening, *lines, closing])


STYLES: dict[str, Style] = {"pirate": pirate, "shout": shout, "butler": butler, "poet": poet}
