"""What is refused, pinned or too much (contract 22, 24, 25, 27)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.running import Server, make_adapter

Starter = Callable[..., Server]
Maker = Callable[..., Path]


def spoiled(path: Path, how: str) -> Path:
    """An adapter directory with one fault."""
    make_adapter(path, how)
    config, weights = path / "adapter_config.json", path / "adapter_model.safetensors"
    if how == "no config":
        config.unlink()
    elif how == "config not JSON":
        config.write_text("{")
    elif how == "no weights":
        weights.unlink()
    elif how == "pickle":
        weights.rename(path / "adapter_model.bin")
    elif how == "link out":
        weights.unlink()
        outside = path.parent / "outside.safetensors"
        outside.write_bytes(b"secret")
        os.symlink(outside, weights)
    elif how == "missing":
        config.unlink()
        weights.unlink()
        path.rmdir()
    return path


@pytest.mark.parametrize("how", ["no config", "config not JSON", "no weights", "pickle", "link out", "missing"])
def test_a_bad_source_is_refused_by_name_and_the_server_goes_on(controlled: Server, tmp_path: Path, how: str) -> None:
    src = spoiled(tmp_path / "bad", how)
    held = controlled.engine()["held"]
    answer = controlled.add("bad", src)
    assert answer.status == 424
    assert answer.error["code"] != answer.error["type"], answer.error
    record = controlled.get("/adapters/bad").json()
    assert (record["state"], record["reason"]) == ("failed", answer.error["message"])
    assert controlled.invoke(adapter="bad").status == 424
    assert controlled.engine()["held"] == held
    assert controlled.invoke(adapter="a1").status == 200
    assert controlled.remove("bad").status == 200


@pytest.mark.parametrize("src", ["relative/path", "../up", "hf://org/model", "http://x/y", "/x/../../etc"])
def test_only_absolute_local_paths_and_s3_are_sources(controlled: Server, src: str) -> None:
    answer = controlled.add("bad", src)
    assert answer.status in (400, 424)
    assert answer.error["param"] == "src"
    assert controlled.invoke(adapter="bad").status in (404, 424)
    controlled.remove("bad")


def test_no_code_of_an_adapter_runs(controlled: Server, adapter: Maker, tmp_path: Path) -> None:
    src = adapter("code")
    (src / "model.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert controlled.add("code", src).status == 200
    assert controlled.invoke(adapter="code").status == 200
    assert not (tmp_path / "ran").exists()
    assert controlled.remove("code").status == 200


def test_sagemakers_paths_with_one_nested_directory_work_and_may_change(controlled: Server, tmp_path: Path) -> None:
    base = tmp_path / "container_123456789012-adapter-ic"
    first = make_adapter(base / "1700000000000-MaeveWestworldService-1" / "inner", "one").parent
    second = make_adapter(base / "1700000009999-MaeveWestworldService-2", "two")
    one = controlled.add("ic", first).json()["adapter"]
    two = controlled.request("POST", "/adapters/ic/update", {"src": str(second)}).json()["adapter"]
    assert one["digest"] != two["digest"]
    assert controlled.remove("ic").status == 200


def test_more_adapters_than_fit_are_507_with_the_counts(started: Starter, adapter: Maker) -> None:
    server = started({"LORAHOST_MAX_ADAPTERS": "2"}, {})
    assert [server.add(f"n{i}", adapter(f"n{i}")).status for i in range(2)] == [200, 200]
    full = server.add("n2", adapter("n2"))
    assert full.status == 507
    assert full.error["type"] == "insufficient_capacity"
    counts = {"loaded", "max_loras", "max_cpu_loras", "pinned"}
    assert counts <= full.error.keys(), full.error
    assert server.invoke(adapter="n0").status == 200
    assert server.remove("n0").status == 200
    assert server.add("n2", adapter("n2")).status == 200


def test_an_engine_without_memory_is_507_and_goes_on_serving(controlled: Server, adapter: Maker) -> None:
    controlled.engine(full=True)
    answer = controlled.add("big", adapter("big"))
    controlled.engine(full=False)
    assert (answer.status, answer.error["type"]) == (507, "insufficient_capacity")
    assert controlled.invoke(adapter="a1").status == 200
    assert controlled.add("big", adapter("big")).status == 200
    assert controlled.remove("big").status == 200


def test_pins_leave_one_slot_free(started: Starter, adapter: Maker) -> None:
    server = started({}, {"max_loras": 3})
    assert [server.add(f"p{i}", adapter(f"p{i}"), pin=True).status for i in range(2)] == [200, 200]
    refused = server.add("p2", adapter("p2"), pin=True)
    assert refused.status == 507
    assert refused.error["pinned"] == 2
    assert server.request("POST", "/adapters/p0/update", {"pin": False}).status == 200
    assert server.add("p2", adapter("p2"), pin=True).status == 200


def test_the_list_survives_what_stands_in_configs(controlled: Server, tmp_path: Path) -> None:
    """Text from an adapter's files reaches messages only as JSON."""
    src = make_adapter(tmp_path / "odd", "odd")
    (src / "adapter_config.json").write_text(json.dumps({"r": "<script>\u2028'\"", "peft_type": "LORA"}))
    answer = controlled.add("odd", src)
    assert answer.status == 424
    assert answer.error["message"]
    assert controlled.get("/adapters").status == 200
    assert controlled.remove("odd").status == 200


def test_a_server_without_lora_refuses_adapters_as_the_caller_s_error(started: Starter, tmp_path: Path) -> None:
    server = started({"LORAHOST_LORA": "false"})
    answer = server.add("a1", make_adapter(tmp_path / "a1", "a1"))
    assert (answer.status, answer.error["code"]) == (400, "lora_off")
    assert "LORAHOST_LORA=false" in answer.error["message"]
    assert server.invoke().status == 200
