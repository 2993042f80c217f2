"""Registering, replacing, listing and removing adapters (contract 15 to 22, 24, 25, 27)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from tests.fakes.running import ATTRIBUTES_HEADER, Answer, Server, wait_for
from tests.fakes.wire import Wire

Starter = Callable[..., Server]
Maker = Callable[..., Path]
LONG = {"prompt": "hi", "max_tokens": 4000, "stream": True}


def words(answer: Answer) -> set[str]:
    """Who wrote the answer: the fake engine repeats `<name>@<digest12>`."""
    assert answer.status == 200, answer
    return set(answer.text.split())


def engine_name(record: dict[str, Any]) -> str:
    return f"{record['name']}@{record['digest'][:12]}"


@pytest.mark.parametrize("root", ["/adapters", "/models/base/adapters"])
@pytest.mark.parametrize("transport", ["body", "query", "both", "strings"])
def test_a_registration_comes_in_the_body_the_query_or_both(
    controlled: Server, adapter: Maker, root: str, transport: str
) -> None:
    name, src = f"r-{transport}", str(adapter("r"))
    query, body = {
        "body": ({}, {"name": name, "src": src, "preload": True}),
        "query": ({"name": name, "src": src, "preload": "true", "pin": "false"}, None),
        "both": ({"name": "overruled", "src": src}, {"name": name}),
        "strings": ({}, {"name": name, "src": src, "preload": "TRUE", "pin": "False"}),
    }[transport]
    answer = controlled.request("POST", f"{root}?{urlencode(query)}", body)
    assert answer.status == 200
    assert answer.json()["status"] == f"Adapter {name} registered"
    assert words(controlled.invoke(adapter=name)) == {engine_name(answer.json()["adapter"])}
    gone = controlled.request("DELETE", f"{root}/{name}")
    assert (gone.status, gone.json()["status"]) == (200, f"Adapter {name} unregistered")
    assert controlled.get(f"{root}/{name}").status == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"),
        ({"name": "x"}, "src"),
        ({"src": "/x"}, "name"),
        ({"name": "", "src": "/x"}, "name"),
        ({"name": "x", "src": ""}, "src"),
        ({"name": " ", "src": "/x"}, "name"),
        ({"name": None, "src": "/x"}, "name"),
        ({"name": 7, "src": "/x"}, "name"),
        ({"name": "x\n", "src": "/x"}, "name"),
        ({"name": "é" * 250, "src": "/x"}, "name"),
        ({"name": "base", "src": "/x"}, "name"),
        ({"name": "x", "src": "/x", "preload": "perhaps"}, "preload"),
        ({"name": "x", "src": "/x", "pin": 3}, "pin"),
        ({"name": "x", "src": "/x", "preload": False, "pin": True}, "pin"),
    ],
)
def test_a_bad_parameter_is_named(server: Server, body: dict[str, Any], param: str) -> None:
    answer = server.request("POST", "/adapters", body)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert param in answer.error["message"]


def test_an_unknown_field_is_ignored_and_said_so(controlled: Server, adapter: Maker) -> None:
    """The platform may send fields that are not known yet; a misspelt one must not go unseen."""
    answer = controlled.request("POST", "/adapters", {"name": "odd", "src": str(adapter("odd")), "pinned": True})
    assert answer.status == 200
    assert "'pinned'" in answer.json()["warnings"][0]
    assert not answer.json()["adapter"]["pin"]
    assert controlled.remove("odd").status == 200


@pytest.mark.parametrize("kind", ["application/octet-stream", "application/vnd.api+json", "text/json", ""])
def test_a_body_is_json_whatever_the_platform_calls_it(controlled: Server, adapter: Maker, kind: str) -> None:
    body = json.dumps({"name": "odd", "src": str(adapter("odd"))}).encode()
    answer = controlled.request("POST", "/adapters", body, {"Content-Type": kind})
    assert answer.status == 200
    assert controlled.remove("odd").status == 200


@pytest.mark.parametrize("body", [b"{", b"[]", b'"name"', b"\xff\xfe", b"7"])
def test_a_body_that_is_no_object_is_refused(server: Server, body: bytes) -> None:
    answer = server.request("POST", "/adapters", body)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


def test_the_answer_comes_when_the_adapter_is_loaded(controlled: Server, adapter: Maker) -> None:
    """Preload is the default; without it the first request loads it, and the alias is what people read."""
    controlled.engine(load_s=0.3)
    eager = controlled.add("eager", adapter("eager"))
    assert (eager.json()["adapter"]["loaded"], eager.json()["adapter"]["state"]) == (True, "ready")
    assert engine_name(eager.json()["adapter"]) in controlled.engine()["held"]
    lazy = controlled.request(
        "POST",
        "/adapters",
        {"name": "lazy", "src": str(adapter("lazy")), "preload": False},
        {"X-Amzn-SageMaker-Adapter-Alias": "Lazy Bones"},
    )
    assert lazy.json()["status"] == "Adapter Lazy Bones registered"
    assert lazy.json()["adapter"]["loaded"] is False
    assert words(controlled.invoke(adapter="lazy")) == {engine_name(lazy.json()["adapter"])}
    assert controlled.get("/adapters/lazy").json()["loaded"] is True
    controlled.engine(load_s=0.0)
    assert {controlled.remove(name).status for name in ("eager", "lazy")} == {200}


def test_the_same_weights_again_change_nothing(controlled: Server, adapter: Maker) -> None:
    src = adapter("same")
    first = controlled.add("same", src).json()["adapter"]
    loads = controlled.engine()["loads"]
    assert controlled.add("same", src).json()["adapter"]["digest"] == first["digest"]
    assert controlled.add("same", adapter("copy", "same")).json()["adapter"]["digest"] == first["digest"]
    assert controlled.engine()["loads"] == loads
    assert controlled.remove("same").status == 200


def test_new_weights_go_live_at_once_while_running_requests_finish_on_the_old(
    controlled: Server, adapter: Maker
) -> None:
    old = engine_name(controlled.add("swap", adapter("one")).json()["adapter"])
    controlled.engine(step_s=0.01)
    with Wire(controlled.port) as wire:
        wire.post("/invocations", {**LONG, "model": "swap", "max_tokens": 60})
        assert wire.head()[0] == 200
        new = engine_name(controlled.add("swap", adapter("two")).json()["adapter"])
        assert new != old
        after = controlled.invoke(adapter="swap")
        assert words(after) == {new}
        assert after.headers[ATTRIBUTES_HEADER] == f"adapter=swap;version={new.partition('@')[2]}"
        record = controlled.get("/adapters/swap").json()
        assert (record["versions_draining"], record["in_flight"]) == (1, 1)
        texts = [json.loads(data[6:])["choices"][0]["text"] for _, data in wire.chunks() if b"[DONE]" not in data]
    assert {text.strip() for text in texts} == {old}
    wait_for(lambda: old not in controlled.engine()["held"], 5, "the old version's removal")
    assert new in controlled.engine()["held"]
    controlled.engine(step_s=0.002)
    assert controlled.remove("swap").status == 200


def test_a_swap_that_fails_leaves_the_old_version(controlled: Server, adapter: Maker, tmp_path: Path) -> None:
    live = engine_name(controlled.add("stay", adapter("stay")).json()["adapter"])
    failed = controlled.add("stay", tmp_path / "nowhere")
    assert failed.status == 424
    assert words(controlled.invoke(adapter="stay")) == {live}
    record = controlled.get("/adapters/stay").json()
    assert record["state"] == "ready"
    assert "nowhere" in record["last_error"]
    assert controlled.remove("stay").status == 200


def test_removing_refuses_new_requests_at_once_and_frees_the_engine(controlled: Server, adapter: Maker) -> None:
    name = engine_name(controlled.add("bye", adapter("bye")).json()["adapter"])
    controlled.engine(step_s=0.01)
    with Wire(controlled.port) as wire:
        wire.post("/invocations", {**LONG, "max_tokens": 60}, {"X-Amzn-SageMaker-Adapter-Identifier": "bye"})
        assert wire.head()[0] == 200
        removal: list[Answer] = []
        thread = threading.Thread(target=lambda: removal.append(controlled.remove("bye")))
        thread.start()
        wait_for(lambda: controlled.get("/adapters/bye").json()["state"] == "draining", 2, "draining")
        assert controlled.invoke(adapter="bye").status == 404
        events = [data for _, data in wire.chunks()]
        assert len(events) == 61
    thread.join(10)
    controlled.engine(step_s=0.002)
    assert removal[0].status == 200
    assert name not in controlled.engine()["held"]
    assert controlled.remove("bye").status == 404
    assert controlled.remove("never").error["message"].count("never") == 1


def test_requests_that_outlast_a_removal_are_told_so(started: Starter, adapter: Maker) -> None:
    server = started({}, {"step_s": 0.01, "removal_s": 0.5})
    name = engine_name(server.add("bye", adapter("bye")).json()["adapter"])
    header = {"X-Amzn-SageMaker-Adapter-Identifier": "bye"}
    with Wire(server.port) as streamed, Wire(server.port) as whole:
        streamed.post("/invocations", LONG, header)
        whole.post("/invocations", {**LONG, "stream": False}, header)
        wait_for(lambda: server.engine()["running"] == [name, name], 5)
        assert server.remove("bye").status == 200
        assert streamed.head()[0] == 200
        *_, error, end = [data.decode() for _, data in streamed.chunks()]
        assert end == "data: [DONE]\n\n"
        assert json.loads(error[6:])["error"]["code"] == "adapter_removed"
        status, _, body = whole.answer()
        assert (status, json.loads(body)["error"]["code"]) == (409, "adapter_removed")
    assert name not in server.engine()["held"]
    assert server.engine()["running"] == []
    assert server.invoke().status == 200


def test_the_list_comes_in_pages(server: Server, adapter: Maker) -> None:
    for i in range(5):
        assert server.add(f"p{i}", adapter("p"), preload=False).status == 200
    names: list[str] = []
    token = ""
    for _ in range(10):
        page = server.get(f"/adapters?limit=2{token}").json()
        assert len(page["adapters"]) <= 2
        names += [one["name"] for one in page["adapters"]]
        if "nextPageToken" not in page:
            break
        token = "&next_page_token=" + quote(page["nextPageToken"])
    assert names == ["a1", "a2", "p0", "p1", "p2", "p3", "p4"]
    assert {"name", "src", "preload", "pin", "state", "rank", "digest"} <= page["adapters"][0].keys()
    for bad in ("limit=0", "limit=x", "limit=-1", "limit=1001", "next_page_token=%21"):
        answer = server.get(f"/adapters?{bad}")
        assert (answer.status, answer.error["param"]) == (400, bad.partition("=")[0])
    assert {server.remove(f"p{i}").status for i in range(5)} == {200}


def test_an_update_changes_source_and_options(controlled: Server, adapter: Maker) -> None:
    first = controlled.add("up", adapter("up1"), preload=False).json()["adapter"]
    moved = controlled.request("POST", "/adapters/up/update", {"src": str(adapter("up2"))})
    assert moved.status == 200
    assert moved.json()["adapter"]["digest"] != first["digest"]
    pinned = controlled.request("POST", "/models/base/adapters/up/update?preload=true&pin=true")
    assert (pinned.json()["adapter"]["pin"], pinned.json()["adapter"]["loaded"]) == (True, True)
    assert controlled.request("POST", "/adapters/up/update", {"pin": False}).json()["adapter"]["pin"] is False
    assert controlled.request("POST", "/adapters/up/update", {"name": "other"}).error["param"] == "name"
    assert controlled.request("POST", "/adapters/none/update", {"pin": False}).status == 404
    assert controlled.remove("up").status == 200


@pytest.mark.parametrize("name", ["a/b", "über", "a b", "x?y=1&z", "50%", "a.b-c_d~e", "..", "x/update"])
def test_any_printable_name_works(controlled: Server, adapter: Maker, name: str) -> None:
    record = controlled.add(name, adapter("odd")).json()["adapter"]
    path = f"/adapters/{quote(name, safe='')}"
    assert controlled.get(path).json()["name"] == name
    answer = controlled.invoke({"prompt": "hi", "max_tokens": 1, "model": name})
    assert answer.text.strip() == engine_name(record)
    assert answer.json()["model"] == name
    assert controlled.request("DELETE", path).status == 200
