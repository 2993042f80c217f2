"""Clients that other people wrote on top of Bedrock's runtime API: litellm and LangChain."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from tests.fakes.running import Server

ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi there"}]
WORDS = 4


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")


def name_in(text: str) -> str:
    [word] = set(text.split())
    return word.partition("@")[0]


@pytest.mark.parametrize("model", ["base", "a1"])
def test_litellm_converses(server: Server, model: str) -> None:
    litellm = importlib.import_module("litellm")
    asked: dict[str, Any] = {
        "model": f"bedrock/converse/{model}",
        "messages": ASKED,
        "max_tokens": 3,
        "aws_region_name": "eu-west-1",
        "aws_bedrock_runtime_endpoint": server.url,
        "num_retries": 0,
    }
    whole = litellm.completion(**asked)
    assert name_in(whole.choices[0].message.content) == model
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (WORDS, 3)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert (sum(map(bool, texts)), name_in("".join(texts))) == (3, model)
    assert chunks[-1].usage.total_tokens == WORDS + 3
    with pytest.raises(litellm.NotFoundError, match="gone"):
        litellm.completion(**{**asked, "model": "bedrock/converse/gone"})


@pytest.mark.parametrize("model", ["base", "a1"])
def test_langchain_converses(server: Server, model: str) -> None:
    importlib.import_module("langchain_aws")
    langchain: Any = importlib.import_module("langchain_aws")
    chat = langchain.ChatBedrockConverse(
        model=model, provider="meta", endpoint_url=server.url, region_name="eu-west-1", max_tokens=3
    )
    whole = chat.invoke([(message["role"], message["content"]) for message in ASKED])
    assert (name_in(whole.content), whole.response_metadata["stopReason"]) == (model, "max_tokens")
    parts = list(chat.stream([(message["role"], message["content"]) for message in ASKED]))
    merged = parts[0]
    for part in parts[1:]:
        merged = merged + part
    assert name_in(merged.text if isinstance(merged.text, str) else merged.text()) == model
    for usage in (whole.usage_metadata, merged.usage_metadata):
        assert (usage["input_tokens"], usage["output_tokens"]) == (WORDS, 3)
