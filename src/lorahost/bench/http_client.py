"""One HTTP server under load: OpenAI's completions and chat, or SageMaker's `/invocations`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from lorahost.bench.timings import Record

Style = Literal["completions", "chat", "invocations"]
ADAPTER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
PATHS: dict[Style, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "invocations": "/invocations",
}
Prompt = str | list[int]


class ServerError(RuntimeError):
    """The server can't be measured: it does not answer, or not with what is needed; the message says which."""


@dataclass(frozen=True)
class Target:
    """A server and how it is asked.

    Attributes:
        url: Its address, without a path.
        style: Which API.
        base: The base model's name, sent as `model` where no adapter is meant; empty sends none.
        adapter_by: Where `/invocations` is told the adapter; the OpenAI routes always take `model`.
        tokens: Tokens of an answer.
        timeout_s: Longest time of one request in seconds.
        body: Further fields of every body, which win over ours.
    """

    url: str
    style: Style
    base: str
    tokens: int
    adapter_by: Literal["header", "model"] = "header"
    timeout_s: float = 600.0
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Models:
    """What /v1/models lists."""

    base: str
    adapters: list[str]


def session() -> aiohttp.ClientSession:
    """A client without a limit of connections, so that it never holds a request back."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


async def discover(http: aiohttp.ClientSession, url: str) -> Models:
    """Base model and adapters of a server; an adapter is what names a `parent`, as vLLM and lorahost list them.

    Raises:
        ServerError: no answer, another status than 200, or no such list.
    """
    try:
        async with http.get(f"{url}/v1/models", timeout=aiohttp.ClientTimeout(total=30)) as answer:
            if answer.status != 200:
                raise ServerError(f"{url}/v1/models: HTTP {answer.status}; name the models instead of discovering them")
            cards = (await answer.json())["data"]
            bases = [card["id"] for card in cards if not card.get("parent")]
            return Models(bases[0] if bases else "", [card["id"] for card in cards if card.get("parent")])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServerError(f"no answer from {url}/v1/models: {error!r}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ServerError(f"{url}/v1/models does not answer with a list of models: {error!r}") from error


def request_of(target: Target, prompt: Prompt, adapter: str, stream: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Body and headers of one request; an empty `adapter` means the base model."""
    body: dict[str, Any] = {"max_tokens": target.tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    headers = {}
    if stream:
        body["stream_options"] = {"include_usage": True}
    if target.style == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if target.style == "invocations" and target.adapter_by == "header":
        if adapter:
            headers[ADAPTER_HEADER] = adapter
    elif adapter or target.base:
        body["model"] = adapter or target.base
    return {**body, **target.body}, headers


async def prompt_tokens(http: aiohttp.ClientSession, target: Target, prompt: Prompt, adapter: str) -> int:
    """How many tokens the server counts in a prompt.

    Raises:
        ServerError: it does not answer, or without usage.
    """
    body, headers = request_of(target, prompt, adapter, stream=False)
    timeout = aiohttp.ClientTimeout(total=target.timeout_s)
    try:
        async with http.post(
            target.url + PATHS[target.style], json={**body, "max_tokens": 1}, headers=headers, timeout=timeout
        ) as answer:
            text = await answer.text()
            if answer.status != 200:
                raise ServerError(f"{target.url}: HTTP {answer.status}: {text[:300]}")
            return int(json.loads(text)["usage"]["prompt_tokens"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServerError(f"no answer from {target.url}: {error!r}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ServerError(f"{target.url} answers without usage.prompt_tokens, so lengths can't be known") from error


async def send(http: aiohttp.ClientSession, target: Target, prompt: Prompt, adapter: str) -> Record:
    """One streamed request. Whatever goes wrong is the record's `error`: `kind: detail`."""
    body, headers = request_of(target, prompt, adapter, stream=True)
    data = json.dumps(body).encode()
    headers["Content-Type"] = "application/json"
    record = Record(adapter, time.perf_counter())
    try:
        async with asyncio.timeout(target.timeout_s):
            async with http.post(
                target.url + PATHS[target.style],
                data=data,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=None),
            ) as answer:
                if answer.status != 200:
                    record.error = f"HTTP {answer.status}: {(await answer.text())[:300]}"
                    return record
                await _read(answer, record)
    except TimeoutError:
        record.error = f"timeout: no end within {target.timeout_s:g} s"
    except aiohttp.ClientError as error:
        record.error = f"{type(error).__name__}: {error}"
    except ValueError as error:
        record.error = f"bad event: {error}"
    if not record.error:
        record.error = _fault(record, target.tokens)
    return record


def _fault(record: Record, wanted: int) -> str:
    """What is wrong with a stream that ended well; empty for nothing."""
    if not record.at:
        return "empty: no token came"
    if not record.tokens:
        # without usage an event must be a token, which holds only if there are as many as were asked for
        record.tokens = len(record.at)
        if record.tokens != wanted:
            return f"uncounted: no usage, and {record.tokens} events for {wanted} tokens"
    return "" if record.tokens == wanted else f"length: {record.tokens} tokens instead of {wanted}"


async def _read(answer: aiohttp.ClientResponse, record: Record) -> None:
    async for event in _events(answer):
        now = time.perf_counter()
        if "error" in event:
            record.error = f"stream error: {json.dumps(event['error'])[:300]}"
            return
        if event.get("choices") and not _role_only(event["choices"][0]):
            record.at.append(now)
        if usage := event.get("usage"):
            record.tokens = int(usage["completion_tokens"])
            record.prompt_tokens = int(usage["prompt_tokens"])


def _role_only(choice: dict[str, Any]) -> bool:
    """Whether it is chat's opening event, which comes before the first token."""
    delta = choice.get("delta")
    return isinstance(delta, dict) and "role" in delta and not delta.get("content") and not choice.get("finish_reason")


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """JSON objects of server-sent events, or of JSON lines."""
    async for line in answer.content:
        text = line.strip().removeprefix(b"data:").strip()
        if text.startswith(b"{"):
            yield json.loads(text)
