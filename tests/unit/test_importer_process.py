"""The importer in its own process: same results, same errors, and nothing left when it dies."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.importer_support import LIMITS, make_config, make_layout, random_pair, write_adapter

from lorahost.adapters import import_process
from lorahost.adapters.import_process import import_in_process
from lorahost.adapters.importer import ImportReport, digest_of, import_adapter
from lorahost.errors import AdapterConflictError, AdapterRejectedError

LAYOUT = make_layout(make_config("Qwen3Moe"), internal_router_lora=True)
Q = "model.layers.0.self_attn.q_proj"
GATE = "model.layers.1.mlp.gate"
WIDE = make_layout(make_config("GptOss", hidden_size=2048, intermediate_size=8192, num_local_experts=64))


def adapter(path: Path) -> Path:
    return write_adapter(path, random_pair(Q, 64, 64) | random_pair(GATE, 64, 4))


def large(path: Path) -> Path:
    """An adapter on which the importer works for a while."""
    rng = np.random.default_rng(0)
    name = "model.layers.0.mlp.experts.base_layer"
    a, b = rng.standard_normal((16 * 64, 2048), np.float32), rng.standard_normal((16384, 16 * 64), np.float32)
    return write_adapter(path, {f"{name}.A": a, f"{name}.B": b}, r=16)


def run(source: Path, target: Path, layout: Any = LAYOUT, limits: Any = LIMITS, **kwargs: Any) -> ImportReport:
    return asyncio.run(import_in_process(source, target, layout, limits, **kwargs))


def test_same_result_as_in_this_process(tmp_path: Path) -> None:
    source = adapter(tmp_path / "a")
    report = run(source, tmp_path / "t")
    assert report == import_adapter(source, tmp_path / "here", LAYOUT, LIMITS)
    assert report.modules == {Q, GATE}
    assert digest_of(tmp_path / "t") == digest_of(tmp_path / "here")


def test_refusal_travels_back_whole(tmp_path: Path) -> None:
    source, limits = adapter(tmp_path / "a"), LIMITS.model_copy(update={"max_rank": 3})
    with pytest.raises(AdapterRejectedError) as e:
        run(source, tmp_path / "t", limits=limits)
    with pytest.raises(AdapterRejectedError) as here:
        import_adapter(source, tmp_path / "t", LAYOUT, limits)
    assert e.value.body() == here.value.body()
    assert e.value.status == here.value.status == 400


def test_existing_target(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    with pytest.raises(AdapterConflictError) as e:
        run(adapter(tmp_path / "a"), tmp_path / "t")
    assert e.value.code == "target_exists"


def test_death_by_signal_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(AdapterRejectedError, match="SIGABRT") as e:
        run(adapter(tmp_path / "a"), tmp_path / "t")
    assert e.value.code == "import_crashed"


def test_unexpected_exception_is_a_crash(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AdapterRejectedError, match=r"exit status 1.*(NotADirectory|FileExists)Error") as e:
        run(adapter(tmp_path / "a"), tmp_path / "file" / "t")
    assert e.value.code == "import_crashed"


def test_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(import_process, "import_adapter", full)
    job = {"layout": LAYOUT.to_json(), "limits": LIMITS.model_dump(), "source": "a", "target": "b"}
    error = import_process._run(job)["error"]
    assert (error["kind"], error["code"], error["status"]) == ("CapacityError", "disk_full", 507)


def test_cancelling_kills_the_child_and_cleans_up(tmp_path: Path) -> None:
    source, out = large(tmp_path / "a"), tmp_path / "out"

    async def cancel() -> int:
        task = asyncio.create_task(import_in_process(source, out / "t", WIDE, LIMITS))
        deadline = time.monotonic() + 30
        while not (staging := list(out.glob(".t.importing-*"))) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        pid = int(staging[0].name.rpartition("-")[2])
        assert os.getpriority(os.PRIO_PROCESS, pid) >= 10
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pid

    pid = asyncio.run(cancel())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not list(out.iterdir())


def test_timeout_kills_the_child(tmp_path: Path) -> None:
    with pytest.raises(AdapterRejectedError, match=r"allowed 0\.05 s") as e:
        run(large(tmp_path / "a"), tmp_path / "out" / "t", WIDE, timeout_s=0.05)
    assert e.value.code == "import_timeout"
    assert not list(tmp_path.glob("out/*"))


def test_works_in_a_thread(tmp_path: Path) -> None:
    source = adapter(tmp_path / "a")

    async def in_thread() -> ImportReport:
        return await asyncio.to_thread(run, source, tmp_path / "t")

    assert asyncio.run(in_thread()).modules == {Q, GATE}
