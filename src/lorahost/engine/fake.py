"""An engine without a model: it repeats who was asked. For the HTTP side, tests and local tries of deployments.

Every answer names the weights that made it (`<name>@<digest12>`, or the base model), token by token, so that an
answer from the wrong adapter can't go unseen.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorahost.core import AdapterVersion, EngineCall, EngineHealth, EngineInfo, Json
from lorahost.errors import AdapterRejectedError, CapacityError, EngineFailedError, InvalidRequestError
from lorahost_kernels.operations import PRODUCTS

FAKE_MAX_MODEL_LEN = 4096
# what a worker says about an operation; here there is none to run
NO_KERNEL = {"path": "none", "reason": "the fake engine has no model", "fallback": False}


class FakeHost:
    """`EngineHost` that steps all its requests every `step_s` seconds.

    Args:
        base_name: Public name of the base model.
        step_s: Seconds a decode step takes; each running request gets one token per step.
        start_s: Seconds the start takes.
        load_s: Seconds a load takes.
        max_loras: Slots it claims to have.
        max_cpu_loras: Adapters it holds at most.
    """

    def __init__(
        self,
        *,
        base_name: str = "base",
        step_s: float = 0.002,
        start_s: float = 0.0,
        load_s: float = 0.0,
        max_loras: int = 4,
        max_cpu_loras: int = 64,
    ) -> None:
        self.base_name = base_name
        self.step_s = step_s
        self.start_s = start_s
        self.load_s = load_s
        self.max_loras = max_loras
        self.max_cpu_loras = max_cpu_loras
        self.versions: dict[int, AdapterVersion] = {}
        self.running: dict[str, AdapterVersion | None] = {}
        self.aborted: list[str] = []
        self.dead = False
        self.hung = False
        self._stopped = False
        self._tokens = 0
        self._step = asyncio.Condition()
        self._stepper: asyncio.Task[None] | None = None

    async def start(self) -> EngineInfo:
        """Starts stepping."""
        await asyncio.sleep(self.start_s)
        self._stepper = asyncio.ensure_future(self._steps())
        return EngineInfo(
            engine="fake",
            device="none",
            base_name=self.base_name,
            max_model_len=FAKE_MAX_MODEL_LEN,
            max_loras=self.max_loras,
            max_lora_rank=64,
            max_cpu_loras=self.max_cpu_loras,
            details={"workers": [{"kernels": {name: dict(NO_KERNEL) for name in PRODUCTS}}]},
        )

    async def _steps(self) -> None:
        for step in itertools.count(1):
            await asyncio.sleep(self.step_s)
            if self.running and not self.hung:
                self._tokens = step
            async with self._step:
                self._step.notify_all()

    async def generate(self, call: EngineCall) -> Json | AsyncIterator[str]:
        """Repeats who was asked until `max_tokens` is reached."""
        prompt_tokens = len(self._prompt(call).split())
        limit = call.body.get("max_completion_tokens") or call.body.get("max_tokens") or 16
        if not isinstance(limit, int) or limit < 1:
            raise InvalidRequestError(f"max_tokens: must be an integer >= 1 (got {limit!r})", param="max_tokens")
        if prompt_tokens + limit > FAKE_MAX_MODEL_LEN:
            raise InvalidRequestError(
                f"the prompt has {prompt_tokens} tokens and max_tokens is {limit}; together the model takes "
                f"{FAKE_MAX_MODEL_LEN}",
                param="prompt",
            )
        if call.version is not None and call.version.engine_id not in self.versions:
            raise EngineFailedError(f"adapter {call.version.engine_name} is not loaded")
        chunks = self._chunks(call, prompt_tokens, limit)
        if call.stream:
            return chunks
        text = ""
        async for event in chunks:
            if event.startswith("data: {"):
                choice = json.loads(event[6:])["choices"]
                text += (choice[0].get("text") or choice[0].get("delta", {}).get("content") or "") if choice else ""
        return self._whole(call, text, prompt_tokens, limit)

    @staticmethod
    def _prompt(call: EngineCall) -> str:
        if call.api == "completions":
            prompt = call.body.get("prompt")
            return prompt if isinstance(prompt, str) else json.dumps(prompt)
        messages = call.body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise InvalidRequestError("messages: must be a non-empty list", param="messages")
        return " ".join(str(m.get("content", "")) if isinstance(m, dict) else str(m) for m in messages)

    async def _tokens_of(self, call: EngineCall, limit: int) -> AsyncGenerator[str, None]:
        who = call.version.engine_name if call.version else self.base_name
        key = f"{call.request_id}-{id(call)}"
        self.running[key] = call.version
        finished = False
        try:
            for _ in range(limit):
                async with self._step:
                    await self._step.wait()
                await self._unhung()
                if self.dead or self._stopped:
                    reason = "the engine process died" if self.dead else "the engine was stopped"
                    raise EngineFailedError(reason, code="engine_dead", status=503)
                if call.version is not None and call.version.engine_id not in self.versions:
                    raise EngineFailedError(f"adapter {who} was removed under a running request")
                yield f"{who} "
            finished = True
        finally:
            del self.running[key]
            if not finished:
                self.aborted.append(call.request_id)

    async def _unhung(self) -> None:
        async with self._step:
            await self._step.wait_for(lambda: self._stopped or not self.hung)

    async def _chunks(self, call: EngineCall, prompt_tokens: int, limit: int) -> AsyncIterator[str]:
        count = 0
        options = call.body.get("stream_options") or {}
        async with aclosing(self._tokens_of(call, limit)) as tokens:
            async for token in tokens:
                count += 1
                reason = "length" if count == limit else None
                if call.api == "chat":
                    choice: Json = {"index": 0, "delta": {"content": token}, "finish_reason": reason}
                else:
                    choice = {
                        "index": 0,
                        "text": token,
                        "logprobs": _logprobs(call, token),
                        "finish_reason": reason,
                    }
                event = self._shell(call, stream=True) | {"choices": [choice]}
                if options.get("continuous_usage_stats"):
                    event["usage"] = _usage(prompt_tokens, count)
                yield _event(event)
        if options.get("include_usage"):
            yield _event(self._shell(call, stream=True) | {"choices": [], "usage": _usage(prompt_tokens, count)})
        yield "data: [DONE]\n\n"

    def _shell(self, call: EngineCall, *, stream: bool) -> Json:
        chat = call.api == "chat"
        kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
        prefix = "chatcmpl" if chat else "cmpl"
        return {
            "id": f"{prefix}-{call.request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": call.served_name,
        }

    def _whole(self, call: EngineCall, text: str, prompt_tokens: int, limit: int) -> Json:
        if call.api == "chat":
            choice: Json = {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "length",
            }
        else:
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}
        return self._shell(call, stream=False) | {"choices": [choice], "usage": _usage(prompt_tokens, limit)}

    async def load(self, version: AdapterVersion) -> frozenset[str]:
        """Takes any version whose directory exists."""
        await asyncio.sleep(self.load_s)
        if not version.path.is_dir():
            raise AdapterRejectedError(f"no adapter at {version.path}", code="engine_refused")
        if len(self.versions) >= self.max_cpu_loras:
            raise CapacityError(f"the engine holds {len(self.versions)} adapters, its limit")
        self.versions[version.engine_id] = version
        return version.modules

    async def unload(self, engine_id: int) -> None:
        """Forgets the version."""
        self.versions.pop(engine_id, None)

    async def loaded(self) -> frozenset[int]:
        """Ids it holds."""
        return frozenset(self.versions)

    async def probe(self, version: AdapterVersion | None) -> tuple[float, ...]:
        """Differs for every version."""
        return (0.0,) if version is None else (float(version.engine_id),)

    def health(self) -> EngineHealth:
        """Dead when a test says so."""
        return EngineHealth(
            not self.dead, len(self.running), self._tokens, "the engine process died" if self.dead else ""
        )

    async def stop(self) -> None:
        """Stops stepping and ends what runs."""
        self._stopped = True
        if self._stepper is not None:
            self._stepper.cancel()
        async with self._step:
            self._step.notify_all()


@dataclass(frozen=True, slots=True)
class PlainReport:
    """What `import_plain` found; the fields of the registry's `ImportReport`."""

    rank: int
    bytes: int
    modules: frozenset[str] = frozenset({"unchecked"})
    warnings: tuple[str, ...] = ()


def import_plain(source: Path, target: Path) -> PlainReport:
    """Copies an adapter without looking into its tensors: the fake engine has no model to check them against.

    Raises:
        AdapterRejectedError: the configuration is not JSON or has no rank.
    """
    try:
        rank = int(json.loads((source / "adapter_config.json").read_text())["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AdapterRejectedError(f"adapter_config.json has no rank r: {error}", code="bad_config") from error
    shutil.copytree(source, target)
    return PlainReport(rank, sum(f.stat().st_size for f in target.rglob("*") if f.is_file()))


def _event(body: Any) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _usage(prompt: int, completion: int) -> Json:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _logprobs(call: EngineCall, token: str) -> Json | None:
    if not call.body.get("logprobs"):
        return None
    return {
        "tokens": ["token_id:7"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{token: -0.5}],
        "text_offset": [0],
    }
