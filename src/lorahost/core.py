"""The words that the whole server shares: adapter versions, engine calls, engine facts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Api = Literal["chat", "completions"]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One immutable set of adapter weights, as the engine knows it.

    Attributes:
        name: Public name, chosen by whoever registered the adapter.
        digest: Hex sha256 over the adapter's source files.
        engine_id: The engine's integer id; never reused, not even after a failed load.
        path: Directory with the normalised adapter; outlives every request that uses it.
        rank: Rank of the normalised tensors.
        modules: Engine modules whose B·A is not zero, by the importer's account.
    """

    name: str
    digest: str
    engine_id: int
    path: Path
    rank: int
    modules: frozenset[str]

    @property
    def engine_name(self) -> str:
        """`<name>@<digest12>`: the engine keys its prefix cache by name, so new weights need a new one."""
        return f"{self.name}@{self.digest[:12]}"


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One generation, in the OpenAI vocabulary, already resolved to weights.

    Attributes:
        api: Which OpenAI body `body` is.
        body: The OpenAI request; its `model` is ignored.
        version: Adapter weights, or None for the base model.
        served_name: What the answer's `model` field says.
        request_id: Shows up in logs and in the answer's `id`.
    """

    api: Api
    body: Json
    version: AdapterVersion | None
    served_name: str
    request_id: str

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """What `/ping` needs to know; read without locks."""

    alive: bool
    running: int
    tokens: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about the engine after its start."""

    engine: str
    device: str
    base_name: str
    max_model_len: int
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    lora_dtype: str = "bfloat16"
    lora_modules: frozenset[str] = frozenset()
    details: Json = field(default_factory=dict)


class AdapterEngine(Protocol):
    """The part of the engine that the adapter registry talks to. All methods run on the engine's loop."""

    async def load(self, version: AdapterVersion) -> frozenset[str]:
        """Loads `version` and returns the modules that hold non-zero LoRA weights in the workers.

        Raises:
            AdapterRejectedError: the engine refused it; nothing of it stays in the engine.
            CapacityError: no slot or memory.
        """

    async def unload(self, engine_id: int) -> None:
        """Removes the weights from the engine for real; checked against the engine's own list."""

    async def loaded(self) -> frozenset[int]:
        """Engine ids that the engine holds now."""

    async def probe(self, version: AdapterVersion | None) -> tuple[float, ...]:
        """Log-probabilities of a fixed prompt's next tokens, for base (None) or an adapter."""


class EngineHost(AdapterEngine, Protocol):
    """The one interface between the server and an engine. Async methods run on the engine's loop."""

    async def start(self) -> EngineInfo:
        """Starts the engine and warms it up; returns once it can serve."""

    async def generate(self, call: EngineCall) -> Json | AsyncIterator[str]:
        """Answers `call`: the OpenAI response, or for `stream` its SSE events (`data: ...\\n\\n`, the last [DONE]).

        Cancelling the awaiting task, or closing the iterator, aborts the request in the engine.

        Raises:
            InvalidRequestError: the body is not valid for this model.
            EngineFailedError: the engine died.
        """

    def health(self) -> EngineHealth:
        """Liveness and progress; thread-safe, never blocks."""

    async def stop(self) -> None:
        """Aborts what runs and frees the device."""
