"""Reading streams that are cut anywhere."""

from __future__ import annotations

import random

import pytest

from lorahost_deploy.errors import DeployError
from lorahost_deploy.invoke import texts, whole_text

STREAM = (
    'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n'
    ': keep-alive\n\ndata: {"choices":[{"delta":{"content":"Gr\u00fc\u00dfe \U0001f642"}}]}\n\n'
    'data: {"choices":[{"text":" \u2028end"}]}\n\ndata: {"choices":[],"usage":{}}\n\ndata: [DONE]\n\n'
).encode()


@pytest.mark.parametrize("seed", range(20))
def test_any_cut_gives_the_same_text(seed: int) -> None:
    cuts = random.Random(seed)
    pieces, left = [], STREAM
    while left:
        size = cuts.randint(1, 9)
        pieces.append(left[:size])
        left = left[size:]
    assert "".join(texts(pieces)) == "Gr\u00fc\u00dfe \U0001f642 \u2028end"


def test_a_stream_that_breaks_is_an_error() -> None:
    with pytest.raises(DeployError, match="before its end mark"):
        list(texts([STREAM[:-20]]))
    with pytest.raises(DeployError, match="engine died"):
        list(texts([b'data: {"error":{"message":"engine died"}}\n\n']))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"choices":[{"message":{"content":"chat"}}]}', "chat"),
        (b'{"choices":[{"text":"completion"}]}', "completion"),
        (b'{"generated_text":"lmi"}', "lmi"),
        (b'{"other":1}', '{"other":1}'),
    ],
)
def test_whole_answers(body: bytes, text: str) -> None:
    assert whole_text(body) == text
