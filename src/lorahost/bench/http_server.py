"""`lorahost serve` as a process that is measured: its environment, its start with adapters, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from lorahost.bench.http_client import Target
from lorahost.bench.point import Point
from lorahost.bench.prompts import random_ids
from lorahost.bench.shapes import write_config

BASE = "base"
START_S = 900.0
STOP_S = 60.0
LOADS_AT_ONCE = 4
ACTIVE = re.compile(r"lorahost plugin active: ([\w=, ]+)")
Known = dict[str, object]


class ServerEndedError(RuntimeError):
    """The server ended, refused an adapter or is not what the step is to measure; the message has its log's end."""


def server_environment(point: Point, model: Path, port: int, home: Path) -> dict[str, str]:
    """The server's environment: the same engine arguments as in the engine's own process.

    Args:
        point: The step.
        model: Folder of the base model.
        port: To listen on.
        home: Folder for the server's own files; one for each server.

    Raises:
        ValueError: `extra` has a value that no variable can hold.
    """
    length = point.input + point.output
    flags: dict[str, object] = {
        "model": model,
        "load_format": "dummy",
        "max_model_len": max(4096, -(-length // 1024) * 1024),
        "max_num_seqs": point.seats,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.85,
        "seed": point.seed,
        "moe_backend": point.moe_backend,
        "no_enable_prefix_caching": True,
    }
    if point.lora:
        flags |= {
            "max_loras": point.slot_count,
            "max_lora_rank": point.rank,
            # the registry keeps room for a new version beside those that serve
            "max_cpu_loras": max(point.adapters, point.slot_count) + 2,
        }
    if speculative := point.speculative_config():
        flags["speculative_config"] = speculative
    environ = dict(os.environ) | {
        "LORAHOST_PORT": str(port),
        "LORAHOST_HOST": "127.0.0.1",
        "LORAHOST_BASE_NAME": BASE,
        "LORAHOST_WORK_DIR": str(home),
        "LORAHOST_LORA": "true" if point.lora else "false",
        **point.variables,
    }
    for name, value in {**flags, **point.engine_extra}.items():
        if value is False:
            raise ValueError(f"extra {name}: false can't be said to the server; give the flag that means it")
        text = "true" if value is True else value if isinstance(value, str) else json.dumps(value, default=str)
        environ["SM_VLLM_" + name.upper()] = text.strip('"')
    return environ


def write_tokenizer(vocab: int, folder: Path) -> None:
    """A tokenizer of `vocab` words, one an id: the server needs one to answer with text."""
    if (folder / "tokenizer.json").is_file():
        return
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    # engines that start at the same time share the folder
    partial = folder / f"tokenizer.{os.getpid()}.partial"
    tokenizer.save(str(partial))
    partial.replace(folder / "tokenizer.json")


def held_port() -> tuple[socket.socket, int]:
    """A free port, and the socket that keeps others from getting it; it does not listen, so a server still can."""
    hold = socket.socket()
    hold.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    hold.bind(("127.0.0.1", 0))
    return hold, int(hold.getsockname()[1])


class Server:
    """The server's process; ended with everything that it started.

    Args:
        environ: See `server_environment`.
        log: File that gets its output.
        own_group: Whether it gets a process group of its own, so that killing it leaves nothing. Without one it is in
            this process's group, whose end is its end.
    """

    def __init__(self, environ: dict[str, str], log: Path, own_group: bool = True) -> None:
        self._log = log
        self._own_group = own_group
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lorahost.cli", "serve"],
                env=environ,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=own_group,
            )
        self.url = f"http://127.0.0.1:{environ['LORAHOST_PORT']}"

    def fail(self, what: str) -> ServerEndedError:
        """The error to raise, with the end of the log."""
        return ServerEndedError(f"{what}; the log's end:\n{self._log.read_text(errors='replace')[-3000:]}")

    def call(self, method: str, path: str, body: object = None, timeout_s: float = 900.0) -> tuple[int, str]:
        """Status and text of one answer; 0 and the reason when nothing answers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return int(answer.status), answer.read().decode(errors="replace")
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode(errors="replace")
        except OSError as failed:
            return 0, str(failed)

    def wait_ready(self) -> None:
        """Returns when /ping says 200.

        Raises:
            ServerEndedError: it ended, or was not ready within 15 minutes.
        """
        until = time.monotonic() + START_S
        while self.call("GET", "/ping", timeout_s=5)[0] != 200:
            if self._process.poll() is not None:
                raise self.fail(f"the server ended with {self._process.returncode}")
            if time.monotonic() > until:
                raise self.fail(f"the server was not ready within {START_S:g} s")
            time.sleep(0.5)

    async def load(self, adapters: Sequence[Path]) -> None:
        """Registers adapters by their folders' names, a few at once: reading and checking one takes seconds.

        Raises:
            ServerEndedError: one is refused.
        """
        free = asyncio.Semaphore(LOADS_AT_ONCE)

        async def one(path: Path) -> None:
            async with free:
                body = {"name": path.name, "src": str(path)}
                status, text = await asyncio.to_thread(self.call, "POST", "/adapters", body)
            if status != 200:
                raise self.fail(f"adapter {path.name} was answered with {status}: {text}")

        await asyncio.gather(*(one(path) for path in adapters))

    def operations(self) -> str:
        """Which code runs each operation, as the plugin has logged it; empty without LoRA."""
        # logged again once the self-check has decided
        found = ACTIVE.findall(self._log.read_text(errors="replace"))
        return str(found[-1]).replace(" ", "") if found else ""

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for what is left a minute later."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            if self._own_group:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()


@contextlib.asynccontextmanager
async def running(
    point: Point, work: Path, *, home: Path | None = None, log: Path | None = None, own_group: bool = True
) -> AsyncIterator[tuple[Server, Known]]:
    """A server with the step's adapters, and what its rows say of this start.

    Args:
        point: The step.
        work: Folder of the model and the adapters, which several servers may share.
        home: Folder for the server's own files, by default one below `work`; not shared.
        log: File that gets its output, by default one in `work`.
        own_group: See `Server`.

    Raises:
        ServerEndedError: the server does not start, refuses an adapter or runs other kernels than the path's.
    """
    from lorahost.bench.vllm_026.adapters import make_adapters

    model = work / f"{point.model}-{point.layer_count}"
    write_config(point.shape, point.layer_count, model)
    write_tokenizer(point.shape.vocab, model)
    adapters = []
    if point.lora:
        adapters = make_adapters(work, point.shape, point.layer_count, point.rank, point.target_names, point.adapters)
    hold, port = held_port()
    started = time.perf_counter()
    environ = server_environment(point, model, port, home or work / f"server-{port}")
    server = Server(environ, log or work / f"server-{port}.log", own_group)
    try:
        _, gpu = await asyncio.gather(asyncio.to_thread(server.wait_ready), asyncio.to_thread(gpu_name))
        await server.load(adapters)
        start_s = time.perf_counter() - started
        operations = server.operations()
        if gpu != "none" and ("=triton" in operations) != point.uses_kernels:
            raise server.fail(f"path {point.path} does not run {operations!r}")
        yield server, {"run": uuid.uuid4().hex[:8], "gpu": gpu, "start_s": start_s, "operations": operations}
    finally:
        hold.close()
        await asyncio.to_thread(server.stop)


def target_of(point: Point, url: str, tokens: int) -> Target:
    """How the server is asked for answers of `tokens` tokens."""
    body: dict[str, object] = {}
    if point.spec == "synthetic":
        ids = random_ids(point.shape.vocab, point.alphabet, point.alphabet, point.seed)
        body["allowed_token_ids"] = sorted(set(ids))
    return Target(url, "completions", BASE, tokens, body=body)


def gpu_name() -> str:
    """The GPU's name as torch has it, asked in a process of its own, which leaves no memory in use; or none."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'none')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[0]
