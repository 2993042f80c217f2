"""`make demo`: starts the server of the image on this machine, asks the base and each adapter, streams one answer."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from http.client import HTTPConnection
from pathlib import Path

HERE = Path(__file__).resolve().parent
SERVE = HERE.parents[1] / "container" / "serve"
ADAPTER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
QUESTION = "Tell me about the sea."
START_S = 600


def body(stream: bool = False) -> bytes:
    """One chat request."""
    return json.dumps(
        {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 80, "temperature": 0, "stream": stream}
    ).encode()


def call(port: int, adapter: str | None, stream: bool = False) -> HTTPConnection:
    """Sends the question to the base model, or to an adapter by SageMaker's header."""
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    headers = {"Content-Type": "application/json"} | ({ADAPTER_HEADER: adapter} if adapter else {})
    connection.request("POST", "/invocations", body(stream), headers)
    return connection


def wait_ready(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    """Waits for GET /ping to say 200, and shows that time passes."""
    started = time.monotonic()
    shown = 0.0
    clear = "\r\033[K" if sys.stdout.isatty() else ""
    while time.monotonic() - started < START_S:
        if server.poll() is not None:
            sys.exit(f"the server ended with code {server.returncode}; its log: {log}\n{log.read_text()[-3000:]}")
        try:
            connection = HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", "/ping")
            answer = connection.getresponse()
            if answer.status == 200:
                print(f"{clear}ready after {time.monotonic() - started:.0f} s")
                return
            state = json.loads(answer.read()).get("reason", "")
        except OSError:
            state = "the socket is not open yet"
        waited = time.monotonic() - started
        if sys.stdout.isatty():
            print(f"\r{waited:4.0f} s  {state}", end="", flush=True)
        elif waited > shown + 15:
            shown = waited
            print(f"{waited:4.0f} s  {state}", flush=True)
        time.sleep(1)
    sys.exit(f"the server was not ready within {START_S} s; its log: {log}")


def show_answers(port: int, names: list[str]) -> None:
    """The same question to the base model and to each adapter, side by side."""
    print(f'\n"{QUESTION}"\n')
    for name in [None, *names]:
        answer = call(port, name).getresponse()
        reply = json.loads(answer.read())
        if answer.status != 200:
            sys.exit(f"{name or 'base'}: {answer.status} {reply}")
        text = reply["choices"][0]["message"]["content"]
        title = f"{reply['model']:<10}"
        print(textwrap.fill(text, 100, initial_indent=title, subsequent_indent=" " * len(title)))


def show_stream(port: int, name: str) -> None:
    """One streamed answer, token by token."""
    print(f"\nstreamed from {name}: ", end="", flush=True)
    for line in call(port, name, stream=True).getresponse():
        if line.startswith(b"data: {"):
            choices = json.loads(line[6:])["choices"]
            print(choices[0]["delta"].get("content") or "" if choices else "", end="", flush=True)
    print()


def hints(port: int, name: str) -> str:
    """What to try next."""
    url = f"http://localhost:{port}"
    question = '\'{"messages": [{"role": "user", "content": "What does a cat do?"}], "max_tokens": 60}\''
    return f"""
try it:
  curl {url}/invocations -d {question}
  curl {url}/invocations -H '{ADAPTER_HEADER}: {name}' -d {question}
  curl {url}/adapters
  .venv/bin/lorahost adapters ls --url {url}
  curl {url}/metrics
Ctrl-C stops it."""


def main() -> None:
    """Starts, asks, streams; then stays up until Ctrl-C, or stops with `--oneshot`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--oneshot", action="store_true", help="stop after the answers")
    options = parser.parse_args()
    adapters = HERE / "adapters"
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", options.port)) == 0:
            sys.exit(f"port {options.port} is taken; choose another with PORT=")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    names = sorted(p.name for p in adapters.iterdir() if p.is_dir())
    log = Path(tempfile.gettempdir()) / f"lorahost-demo-{options.port}.log"
    # a client's key of another server would be taken for a wish that this one can't keep
    inherited = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
    environment = inherited | {
        "SM_VLLM_MODEL": str(HERE / "model"),
        "LORAHOST_BASE_NAME": "base",
        "LORAHOST_ADAPTERS_DIR": str(adapters),
        "LORAHOST_PORT": str(options.port),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    print(f"starting {SERVE} on port {options.port}; log: {log}")
    with log.open("wb") as sink:
        server = subprocess.Popen([str(SERVE)], env=environment, stdout=sink, stderr=subprocess.STDOUT)
    try:
        wait_ready(options.port, server, log)
        show_answers(options.port, names)
        show_stream(options.port, names[0])
        if not options.oneshot:
            print(hints(options.port, names[0]), flush=True)
            print(f"the server ended with code {server.wait()}; its log: {log}")
    except KeyboardInterrupt:
        print()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


if __name__ == "__main__":
    main()
