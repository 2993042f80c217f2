"""Prompts of a given length: random token ids, random words, or pieces of a text."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from pathlib import Path

MIN_WORDS = 16


def random_ids(vocab: int, count: int, alphabet: int, *seeds: int) -> list[int]:
    """`count` token ids of the middle of a vocabulary, away from its special tokens at both ends.

    Args:
        vocab: Size of the vocabulary.
        count: How many.
        alphabet: Drawn from so many different ids, the same for every prompt; 0 for all.
        seeds: The same seeds give the same ids.
    """
    low, high = vocab // 100, vocab * 94 // 100
    if not alphabet:
        return random.Random(repr(seeds)).choices(range(low, high), k=count)
    letters = random.Random(0).sample(range(low, high), min(alphabet, high - low))
    return random.Random(repr(seeds)).choices(letters, k=count)


def random_words(count: int = 5000) -> list[str]:
    """Lower-case words of two to nine letters, the same at every call."""
    rng = random.Random(0)
    return ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9))) for _ in range(count)]


def words_of(path: Path) -> list[str]:
    """The words of a text, line ends kept at the words before them.

    Raises:
        ValueError: the text is not UTF-8 or has under 16 words.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"text {path}: not UTF-8 ({error.reason} at byte {error.start})") from error
    words = [word + ("\n" if last else "") for line in lines for word, last in _marked(line.split())]
    if len(words) < MIN_WORDS:
        raise ValueError(f"text {path}: {len(words)} words, at least {MIN_WORDS} are needed")
    return words


def _marked(words: Sequence[str]) -> list[tuple[str, bool]]:
    return [(word, i == len(words) - 1) for i, word in enumerate(words)]


def passage(words: Sequence[str], count: int, *seeds: int) -> str:
    """`count` words in their order from a random place on, from the start again at the end."""
    start = random.Random(repr(seeds)).randrange(len(words))
    chosen = (words[(start + i) % len(words)] for i in range(count))
    return "".join(word if word.endswith("\n") else word + " " for word in chosen).strip()
