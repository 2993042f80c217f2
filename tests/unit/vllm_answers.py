"""LMI requests, and the answers that vLLM's own code builds for them from engine outputs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.engine.protocol import RequestResponseMetadata
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from lorahost.requests.invocation import Invocation, RequestSettings, parse

PROMPT_IDS = [11, 12, 13]
MESSAGES = [{"role": "user", "content": "Hi"}]


def ask(
    inputs: Any = "Once", accept: str | None = None, tgi: bool = False, stream: bool = False, **params: Any
) -> Invocation:
    body = {"inputs": inputs, "parameters": params, "stream": stream}
    return parse(json.dumps(body).encode(), None, accept, {}, RequestSettings(tgi_compat=tgi))


def serving() -> OpenAIServingCompletion:
    """vLLM's completion serving with nothing of an engine: enough to build answers and chunks."""
    made: Any = object.__new__(OpenAIServingCompletion)
    made.enable_force_include_usage = made.enable_prompt_tokens_details = False
    made.enable_per_request_metrics = made.return_tokens_as_token_ids = False
    made.system_fingerprint = None
    return made


def output(
    index: int, steps: list[tuple[int, str]], text: str, finish: str | None, stop: Any = None
) -> CompletionOutput:
    logprobs = [
        {token_id: Logprob(-0.5, 1, piece), token_id + 100: Logprob(-2.0, 2, "alt" + piece)}
        for token_id, piece in steps
    ]
    return CompletionOutput(index, text, [token_id for token_id, _ in steps], None, logprobs, None, finish, stop)


def request_output(outputs: list[CompletionOutput], prompt_logprobs: Any = None) -> RequestOutput:
    return RequestOutput("r", "Once", PROMPT_IDS, prompt_logprobs, outputs, True)


def whole(invocation: Invocation, results: list[RequestOutput]) -> dict[str, Any]:
    request = CompletionRequest.model_validate(invocation.calls[0].body)
    metadata = RequestResponseMetadata(request_id="r")
    response = serving().request_output_to_completion_response(results, request, "r", 0, "m", None, metadata)
    return json.loads(response.model_dump_json())  # type: ignore[no-any-return]


def chunks(invocation: Invocation, steps: list[tuple[int, CompletionOutput | Exception]]) -> list[str]:
    """vLLM's SSE events when the engine gives `steps`, each for one prompt."""
    request = CompletionRequest.model_validate(invocation.calls[0].body)

    async def engine() -> AsyncIterator[tuple[int, RequestOutput]]:
        for prompt, step in steps:
            if isinstance(step, Exception):
                raise step
            yield prompt, request_output([step])

    async def collect() -> list[str]:
        stream = serving().completion_stream_generator(
            request, [{}] * 2, engine(), "r", 0, "m", 2, None, RequestResponseMetadata(request_id="r")
        )
        return [event async for event in stream]

    return asyncio.run(collect())
