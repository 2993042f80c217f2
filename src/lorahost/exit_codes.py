"""How `lorahost serve` and the image's `serve` end: every code with its meaning, in one place."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """A process's end; `docs/observability.md` has the same table."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> ExitCode:
        """A code that carries its meaning."""
        code = int.__new__(cls, value)
        code._value_ = value
        code.meaning = meaning
        return code

    DRAINED = 0, "ended by SIGTERM, SIGQUIT or SIGINT"
    USAGE = 2, "the image's entry point got another argument than `serve`"
    ENGINE_DEAD = 3, "the engine died or hung, after `LORAHOST_EXIT_GRACE_S`"
    START_FAILED = 4, "the engine or the host did not start, after `LORAHOST_EXIT_GRACE_S`; the log says why"
    WORKER_LOST = 5, "the server's worker process was killed, by the out-of-memory killer for example"
    SETTINGS = 30, "a bad or unknown setting, or a variable of vLLM's own HTTP server whose promise can't be kept"
    MODEL = 31, "no base model, or its files are not all there"
    ENGINE = 32, "no vLLM, or another version"
    PLUGIN = 33, "the vLLM plugin is missing or shut out by `VLLM_PLUGINS`"
    DEVICE = 34, "fewer GPUs than asked for"
    DRIVER = 35, "no NVIDIA driver, or one that is too old"
    SHM = 36, "too little shared memory for several GPUs"
    WORK_DIR = 37, "`LORAHOST_WORK_DIR` is not writable"
    PORT = 38, "the port can't be listened on"
    ADAPTERS = 39, "`LORAHOST_ADAPTERS_DIR` is no directory"


def markdown() -> str:
    """The table's rows, as the documentation has them."""
    return "\n".join(f"| {code.value} | {code.meaning} |" for code in ExitCode)
