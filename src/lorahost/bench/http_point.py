"""A step through the front door: `lorahost serve` with the step's engine, loaded over HTTP by this process."""

from __future__ import annotations

import asyncio
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
from pathlib import Path

from lorahost.bench import serve
from lorahost.bench.http_client import Target
from lorahost.bench.point import Point
from lorahost.bench.prompts import random_ids
from lorahost.bench.shapes import write_config

BASE = "base"
START_S = 900.0
ACTIVE = re.compile(r"lorahost plugin active: ([\w=, ]+)")


class ServerEndedError(RuntimeError):
    """The server ended, refused an adapter or is not what the step is to measure; the message has its log's end."""


def server_environment(point: Point, model: Path, port: int, work: Path) -> dict[str, str]:
    """The server's environment: the same engine arguments as in the engine's own process.

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
        "LORAHOST_WORK_DIR": str(work / "server"),
        "LORAHOST_LORA": "true" if point.lora else "false",
    }
    for name, value in {**flags, **point.extra}.items():
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
    tokenizer.save(str(folder / "tokenizer.json"))


class Server:
    """The server's process; ended with everything that it started."""

    def __init__(self, environ: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lorahost.cli", "serve"],
                env=environ,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
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

    def operations(self) -> str:
        """Which code runs each operation, as the plugin has logged it; empty without LoRA."""
        # logged again once the self-check has decided
        found = ACTIVE.findall(self._log.read_text(errors="replace"))
        return str(found[-1]).replace(" ", "") if found else ""

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for what is left a minute later."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


async def measure(point: Point, work: Path) -> list[dict[str, object]]:
    """One server start, then every load's repeats as rows.

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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = time.perf_counter()
    server = Server(server_environment(point, model, port, work), work / f"server-{port}.log")
    try:
        server.wait_ready()
        for path in adapters:
            status, text = server.call("POST", "/adapters", {"name": path.name, "src": str(path)})
            if status != 200:
                raise server.fail(f"adapter {path.name} was answered with {status}: {text}")
        start_s = time.perf_counter() - started
        operations = server.operations()
        gpu = gpu_name()
        if gpu != "none" and ("=triton" in operations) != point.uses_kernels:
            raise server.fail(f"path {point.path} does not run {operations!r}")
        rows: list[dict[str, object]] = []
        run = uuid.uuid4().hex[:8]
        body: dict[str, object] = {}
        if point.spec == "synthetic":
            ids = random_ids(point.shape.vocab, point.alphabet, point.alphabet, point.seed)
            body["allowed_token_ids"] = sorted(set(ids))
        target = Target(server.url, "completions", BASE, point.output, body=body)
        for load in point.loads:
            plan = serve.Plan(
                point.names, point.input, load, point.requests_of(load), point.repeats, point.warmup, point.choice,
                vocab=point.shape.vocab, alphabet=point.alphabet, seed=point.seed,
            )  # fmt: skip
            for figures in await serve.run(target, plan):
                row = {"load": str(load), "gpu": gpu, "start_s": start_s, "operations": operations}
                rows.append({**point.row(), **row, **figures, "run": run})
                print("REPEAT", json.dumps({"load": str(load), **figures}), flush=True)
        return rows
    finally:
        await asyncio.to_thread(server.stop)


def gpu_name() -> str:
    """The GPU's name as torch has it, asked in a process of its own, which leaves no memory in use; or none."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'none')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[0]
