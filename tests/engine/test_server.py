"""The whole server on vLLM's real CPU engine, against Hugging Face and PEFT on the same weights."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tests.engine.conftest import NAMES, Models
from tests.engine.tiny_models import Reference
from tests.fakes.running import ADAPTER_HEADER, ATTRIBUTES_HEADER, Server, wait_for

pytestmark = pytest.mark.engine
PROMPT = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100]
TOKENS = 12
LOGPROB_TOLERANCE = 1e-3
# A process of its own: this one holds models, and may not get to run while the engine does.
LEAVER = f"""
import http.client, socket, sys, time
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
headers = {{"Content-Type": "application/json", "{ADAPTER_HEADER}": "cy"}}
connection.request("POST", "/invocations", sys.argv[2], headers)
time.sleep(0.1)
print(time.time())
connection.sock.shutdown(socket.SHUT_RDWR)
connection.close()
"""
TIE = 1e-3


def complete(
    server: Server, adapter: str | None, prompt: list[int] | None = None, tokens: int = TOKENS
) -> dict[str, Any]:
    """A greedy completion with log-probabilities."""
    body = {
        "prompt": prompt or PROMPT,
        "max_tokens": tokens,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = server.invoke(body, adapter)
    assert answer.status == 200, answer
    whole: dict[str, Any] = answer.json()
    return whole


def token_ids(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def streamed_ids(line: bytes) -> list[int]:
    """Token ids of one line of a completion stream."""
    if not line.startswith(b"data: {"):
        return []
    return [i for choice in json.loads(line[6:])["choices"] for i in choice.get("token_ids") or []]


def check_parity(answer: dict[str, Any], reference: Reference, prompt: list[int]) -> None:
    """Each token is the reference's best one unless the two best are tied; log-probabilities agree."""
    ids = token_ids(answer)
    expected, _ = reference.next_logprobs(prompt, ids)
    best = expected.topk(2, dim=-1)
    for step, token in enumerate(ids):
        if best.values[step, 0] - best.values[step, 1] > TIE:
            assert token == best.indices[step, 0], f"step {step}"
    served = torch.tensor(answer["choices"][0]["logprobs"]["token_logprobs"])
    wanted = expected[torch.arange(len(ids)), torch.tensor(ids)]
    assert (served - wanted).abs().max() < LOGPROB_TOLERANCE


@pytest.mark.parametrize("name", [None, *NAMES])
def test_tokens_and_logprobs_equal_peft(server: Server, tiny: Models, name: str | None) -> None:
    reference = Reference(tiny.base, tiny.adapters[name] if name else None)
    answer = complete(server, name)
    assert answer["model"] == (name or "tiny")
    check_parity(answer, reference, PROMPT)


def test_more_adapters_than_slots_at_once_answer_as_alone(server: Server) -> None:
    alone = {name: token_ids(complete(server, name)) for name in [None, *NAMES]}
    with ThreadPoolExecutor(20) as pool:
        jobs = [(name, pool.submit(complete, server, name)) for _ in range(4) for name in alone]
        for name, job in jobs:
            assert token_ids(job.result()) == alone[name], name


def test_an_unknown_adapter_is_refused_and_never_answered_by_the_base(server: Server) -> None:
    answer = server.invoke(adapter="nobody")
    assert answer.status == 404
    assert "nobody" in answer.error["message"]


def test_the_answer_proves_who_gave_it(server: Server) -> None:
    digest = server.get("/adapters/bob").json()["digest"]
    answer = server.invoke({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}, "bob")
    assert answer.json()["model"] == "bob"
    assert answer.headers[ATTRIBUTES_HEADER] == f"adapter=bob;version={digest[:12]}"


def test_new_weights_under_the_same_name_replace_the_old_while_requests_run(server: Server, tiny: Models) -> None:
    """Prefix caching is on: the same prompt before and after must not meet the old version's cached blocks."""
    prompt = PROMPT * 8
    before = complete(server, "ada", prompt)
    check_parity(before, Reference(tiny.base, tiny.adapters["ada"]), prompt)
    old = server.get("/adapters/ada").json()["digest"]
    body = {"prompt": prompt, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    headers = {"Content-Type": "application/json", ADAPTER_HEADER: "ada"}
    connection.request("POST", "/invocations", json.dumps({**body, "stream": True}), headers)
    events = iter(connection.getresponse())
    ids = streamed_ids(next(events))
    assert server.add("ada", tiny.successor).status == 200
    for line in events:
        ids += streamed_ids(line)
    assert len(ids) == 400
    assert ids[:TOKENS] == token_ids(before)
    after = complete(server, "ada", prompt)
    check_parity(after, Reference(tiny.base, tiny.successor), prompt)
    record = server.get("/adapters/ada").json()
    assert record["digest"] != old
    wait_for(lambda: server.get("/adapters/ada").json()["versions_draining"] == 0, 10)
    assert server.add("ada", tiny.adapters["ada"]).status == 200
    assert token_ids(complete(server, "ada", prompt)) == token_ids(before)


def test_an_unloaded_adapter_is_gone_and_can_come_back(server: Server, tiny: Models) -> None:
    expected = token_ids(complete(server, "dee"))
    assert server.remove("dee").status == 200
    assert server.invoke(adapter="dee").status == 404
    assert server.remove("dee").status == 404
    assert server.add("dee", tiny.adapters["dee"]).status == 200
    assert token_ids(complete(server, "dee")) == expected


def test_loading_and_unloading_again_and_again_frees_memory(server: Server, tiny: Models) -> None:
    """Host copies of removed adapters are given back: 60 cycles cost less than what 60 leaked copies would."""

    def resident_kb() -> int:
        total = 0
        for pid in descendants(server.process.pid):
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            total += next((int(x.split()[1]) for x in status.splitlines() if x.startswith("VmRSS:")), 0)
        return total

    def cycle() -> None:
        assert server.add("extra", tiny.successor).status == 200
        assert server.remove("extra").status == 200

    for _ in range(10):
        cycle()
    before = resident_kb()
    for _ in range(60):
        cycle()
    assert resident_kb() - before < 40_000, "kB grown over 60 cycles"


def descendants(root: int) -> list[int]:
    """Process ids of `root` and below."""
    from lorahost.host import _descendants

    return [root, *_descendants(root)]


def test_structured_output_is_vllms_own(server: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 40,
        "temperature": 0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "string", "enum": ["yes", "no"]}},
        },
    }
    answer = server.invoke(body, "cy")
    assert answer.status == 200, answer
    assert json.loads(answer.text) in ("yes", "no")


def test_a_prompt_that_is_too_long_names_the_counts(server: Server) -> None:
    answer = server.invoke({"prompt": [65] * 600, "max_tokens": 5}, "bob")
    assert answer.status == 400
    assert "600" in answer.error["message"]
    assert "512" in answer.error["message"]


def test_a_bad_field_is_named_with_its_value(server: Server) -> None:
    answer = server.invoke({"prompt": "hi", "max_tokens": 2, "temperature": -3})
    assert answer.status == 400
    assert "temperature" in answer.error["message"]
    assert "-3" in answer.error["message"]


def test_the_openai_client_streams_from_an_adapter_by_its_name(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    whole = client.completions.create(model="bob", prompt=PROMPT, max_tokens=TOKENS, temperature=0)
    stream = client.completions.create(model="bob", prompt=PROMPT, max_tokens=TOKENS, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == TOKENS
    assert {m.id for m in client.models.list()} >= {"tiny", *NAMES}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place_within_a_second(server: Server, stream: bool) -> None:
    """By the clocks of both sides: on few cores nobody else may get to run while the engine does.

    A client that got to leave only when its answer was complete, or within a second of that, tries again.
    """

    def lines() -> list[dict[str, Any]]:
        return [line for line in server.log_lines_that_are_json() if line.get("logger") == "lorahost.request"]

    def next_line(seen: int) -> dict[str, Any]:
        wait_for(lambda: len(lines()) > seen, 60, "the request's end")
        return lines()[seen]

    wait_for(lambda: server.metric("lorahost_running") == 0, 30)
    before = server.metric("lorahost_aborted_total")
    body = {"prompt": PROMPT, "max_tokens": 490, "n": 64, "ignore_eos": True, "stream": stream}
    command = [sys.executable, "-c", LEAVER, str(server.port), json.dumps(body)]
    for seen in range(len(lines()), len(lines()) + 3):
        left = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        line = next_line(seen)
        late = datetime.fromisoformat(line["time"]).timestamp() - left
        if line.get("aborted") or late >= 1.0:
            break
    assert line.get("aborted"), f"the request went on for {late:.1f} s without its client: {line}"
    assert late < 1.0
    assert server.metric("lorahost_aborted_total") == before + 1
    wait_for(lambda: server.metric("lorahost_running") == 0, 10)
    wait_for(lambda: server.metric("vllm:num_requests_running") == 0, 10)


def test_metrics_have_the_engines_and_ours(server: Server) -> None:
    complete(server, "cy")
    text = server.get("/metrics").body.decode()
    for name in ("vllm:kv_cache_usage_perc", "vllm:lora_requests_info", "lorahost_adapter_load_seconds_bucket"):
        assert name in text, name
    assert 'lorahost_tokens_total{adapter="cy",kind="output"}' in text


def test_streams_go_on_while_adapters_load(server: Server, tiny: Models) -> None:
    """A stream that runs while adapters come and go is complete and equal to the one that ran alone."""
    alone = token_ids(complete(server, "bob", tokens=200))
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            server.add("churn", tiny.successor)
            server.remove("churn")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        assert token_ids(complete(server, "bob", tokens=200)) == alone
    finally:
        stop.set()
        thread.join()
    time.sleep(0.1)
    assert server.ping() == 200


def test_an_adapter_brings_its_own_chat_template(server: Server, tiny: Models, tmp_path: Path) -> None:
    path = tmp_path / "templated"
    shutil.copytree(tiny.adapters["bob"], path)
    (path / "chat_template.jinja").write_text("{% for m in messages %}<<{{ m.content }}>>{% endfor %}")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}
    assert server.add("templated", path).status == 200
    assert server.invoke(body, "templated").json()["usage"]["prompt_tokens"] == len("<<hi>>")
    assert server.invoke(body, "bob").json()["usage"]["prompt_tokens"] == len("user: hi\nassistant:")
    refused = server.invoke({**body, "chat_template": "{{ messages }}"}, "templated")
    assert refused.status == 400
    assert "template" in refused.error["message"]
    assert server.get("/adapters/templated").json()["digest"] != server.get("/adapters/bob").json()["digest"]
    assert server.remove("templated").status == 200
