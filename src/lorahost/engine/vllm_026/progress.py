"""Counts engine steps and tokens, so that a hung engine can be told from an idle one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


@dataclass(slots=True)
class Progress:
    """Monotonic counters; written by the engine's loop, read by any thread."""

    steps: int = 0
    tokens: int = 0


def progress_logger(progress: Progress) -> type[StatLoggerBase]:
    """A stat logger class that feeds `progress`, for `AsyncLLM(stat_loggers=[...])`."""

    class ProgressLogger(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            progress.steps += 1
            if iteration_stats is not None:
                progress.tokens += iteration_stats.num_generation_tokens + iteration_stats.num_prompt_tokens

        def log_engine_initialized(self) -> None:
            pass

    return ProgressLogger
