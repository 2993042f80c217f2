"""A client for `image_test.py`, run by the image's own Python in the network of the container under test.

`image_client.py wait SECONDS [loading]` until `/ping` is 200, `ask` for answers, `drain` streams while the container is
told to stop. Each prints one line a check; the first that fails ends it with the reason.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from typing import Any

ADAPTER = "pirate"
SOURCE = f"/opt/ml/models/{ADAPTER}"
HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
PROOF = "X-Amzn-SageMaker-Custom-Attributes"
QUESTION = {"messages": [{"role": "user", "content": "Tell me about the sea."}], "max_tokens": 20, "temperature": 0}
# long enough to be running when the container is told to stop
LONG = {"prompt": "The sea", "max_tokens": 1500, "n": 4, "ignore_eos": True, "stream": True}


def connect(timeout_s: float = 60) -> http.client.HTTPConnection:
    """A connection to the server."""
    return http.client.HTTPConnection("127.0.0.1", 8080, timeout=timeout_s)


def call(method: str, path: str, body: object = None, **headers: str) -> tuple[int, http.client.HTTPMessage, str]:
    """Status, headers and text of one answer."""
    connection = connect()
    text = None if body is None else json.dumps(body)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, text, {"Content-Type": "application/json", **sent})
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


def check(what: str, holds: bool, seen: object) -> None:
    """Prints the check, or ends with what was seen instead."""
    if not holds:
        sys.exit(f"failed: {what}; seen: {seen}")
    print(what, flush=True)


def wait(seconds: float, loading: bool) -> None:
    """Waits for `/ping` to be 200; `loading` says that it has to be 503 before."""
    began, seen = time.monotonic(), set()
    while time.monotonic() - began < seconds:
        try:
            seen.add(call("GET", "/ping")[0])
        except OSError:
            seen.add(0)
        if 200 in seen:
            break
        time.sleep(0.3)
    needed = {503, 200} if loading else {200}
    check(f"/ping is {'503 until the engine is ready, then ' if loading else ''}200", needed <= seen, seen)


def content(text: str) -> str:
    """The text of a chat answer."""
    return str(json.loads(text)["choices"][0]["message"]["content"])


def ask() -> None:
    """The base, an adapter by its header, a name that nobody has, log-probabilities."""
    status, _, text = call("POST", "/adapters", {"name": ADAPTER, "src": SOURCE})
    check(f"POST /adapters registers {SOURCE}", status == 200, text)
    status, headers, base = call("POST", "/invocations", QUESTION)
    check("the base model answers", status == 200 and bool(content(base)), base)
    status, headers, text = call("POST", "/invocations", QUESTION, **{HEADER: ADAPTER})
    named = f"adapter={ADAPTER};version=" in headers.get(PROOF, "") and json.loads(text).get("model") == ADAPTER
    check("the header picks the adapter, and the answer says so", status == 200 and named, (dict(headers), text))
    check("the adapter's answer is not the base's", content(text) != content(base), text)
    status, _, text = call("POST", "/invocations", QUESTION, **{HEADER: "nobody"})
    check("an unknown adapter is a 404", status == 404, text)
    status, _, text = call("POST", "/invocations", {**QUESTION, "logprobs": True, "top_logprobs": 2})
    given = status == 200 and json.loads(text)["choices"][0]["logprobs"]["content"]
    check("log-probabilities come without a compiler", bool(given), text)


def drain() -> None:
    """Streams from the adapter; prints `streaming`, and then expects to be stopped."""
    refused: dict[str, Any] = {}

    def watch() -> None:
        while True:
            try:
                if call("GET", "/ping")[0] == 503:
                    break
            except OSError:
                return
            time.sleep(0.05)
        refused["status"], headers, _ = call("POST", "/invocations", QUESTION)
        refused["retry"] = headers.get("Retry-After")

    connection = connect()
    headers = {"Content-Type": "application/json", HEADER: ADAPTER}
    connection.request("POST", "/invocations", json.dumps(LONG), headers)
    answer = connection.getresponse()
    first = answer.readline()
    check("a stream runs", answer.status == 200 and first.startswith(b"data: "), first)
    print("streaming", flush=True)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    events = [line for line in answer if line.startswith(b"data: ")]
    watcher.join(10)
    reasons = [c.get("finish_reason") for e in events[:-1] for c in json.loads(e[6:]).get("choices", ())]
    whole = events[-1].strip() == b"data: [DONE]" and reasons.count("length") == LONG["n"]
    check("the stream that was running ends whole", whole, events[-2:])
    held = refused.get("status") == 503 and bool(refused.get("retry"))
    check("meanwhile /ping is 503 and new requests get 503 with Retry-After", held, refused)


def main() -> None:
    """Runs the part that is named."""
    part, *rest = sys.argv[1:]
    if part == "wait":
        wait(float(rest[0]), "loading" in rest)
    else:
        {"ask": ask, "drain": drain}[part]()


if __name__ == "__main__":
    main()
