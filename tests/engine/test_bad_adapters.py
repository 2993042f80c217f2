"""Bad adapters over HTTP: each is refused with its status, code and both sides, and the engine still serves."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.engine.conftest import Models
from tests.engine.test_server import complete, token_ids
from tests.fakes.running import Server

pytestmark = pytest.mark.engine
WEIGHTS = "adapter_model.safetensors"
Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def configure(path: Path, **changes: Any) -> None:
    """Changes fields of adapter_config.json."""
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit(path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Changes tensors."""
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS)


def big_rank(path: Path) -> None:
    def widen(tensors: dict[str, np.ndarray]) -> None:
        for name, value in tensors.items():
            if ".self_attn." in name:
                tensors[name] = np.repeat(value, 32, axis=0 if "lora_A" in name else 1)

    edit(path, widen)
    configure(path, r=128, lora_alpha=128)


def truncated(path: Path) -> None:
    data = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(data[: len(data) // 2])


def zero_b(path: Path) -> None:
    edit(path, lambda t: t.update({n: np.zeros_like(v) for n, v in t.items() if "lora_B" in n}))


def not_finite(path: Path) -> None:
    edit(path, lambda t: t.update({Q_A: np.full_like(t[Q_A], np.nan)}))


def wrong_shape(path: Path) -> None:
    edit(path, lambda t: t.update({Q_A: np.ascontiguousarray(t[Q_A][:, :-8])}))


def foreign_module(path: Path) -> None:
    edit(path, lambda t: t.update({Q_A.replace("self_attn.q_proj", "cross_attn.q_proj"): t.pop(Q_A)}))


def lonely_factor(path: Path) -> None:
    edit(path, lambda t: t.pop(Q_A))


def pickled(path: Path) -> None:
    (path / WEIGHTS).rename(path / "adapter_model.bin")


def no_config(path: Path) -> None:
    (path / "adapter_config.json").unlink()


def config_no_json(path: Path) -> None:
    (path / "adapter_config.json").write_text("{")


def link_outside(path: Path) -> None:
    (path / WEIGHTS).unlink()
    (path / WEIGHTS).symlink_to("/etc/hostname")


KINDS: list[tuple[str, Callable[[Path], None], int, str]] = [
    ("rank", big_rank, 400, "128"),
    ("dora", lambda p: configure(p, use_dora=True), 424, "use_dora"),
    ("bias", lambda p: configure(p, bias="all"), 424, "bias"),
    ("modules_to_save", lambda p: configure(p, modules_to_save=["lm_head"]), 424, "lm_head"),
    ("peft_type", lambda p: configure(p, peft_type="IA3"), 424, "IA3"),
    ("truncated", truncated, 424, "safetensors"),
    ("zero", zero_b, 424, "zero"),
    ("nan", not_finite, 424, "NaN"),
    ("shape", wrong_shape, 424, "64"),
    ("foreign", foreign_module, 424, "cross_attn"),
    ("lonely", lonely_factor, 424, "lora_A"),
    ("pickle", pickled, 424, ".bin"),
    ("no_config", no_config, 424, "adapter_config.json"),
    ("config_no_json", config_no_json, 424, "JSON"),
    ("link", link_outside, 424, "link"),
]


@pytest.mark.parametrize(("name", "spoil", "status", "said"), KINDS, ids=[k[0] for k in KINDS])
def test_a_bad_adapter_is_refused_and_the_engine_goes_on(
    server: Server,
    tiny: Models,
    tmp_path: Path,
    name: str,
    spoil: Callable[[Path], None],
    status: int,
    said: str,
) -> None:
    expected = token_ids(complete(server, "bob", tokens=4))
    path = tmp_path / name
    shutil.copytree(tiny.adapters["ada"], path)
    spoil(path)
    answer = server.add(f"bad-{name}", path)
    assert answer.status == status, answer
    assert said in answer.error["message"], answer.error
    invoked = server.invoke(adapter=f"bad-{name}")
    assert invoked.status in (404, 424), invoked
    assert server.get(f"/adapters/bad-{name}").json()["state"] == "failed"
    assert server.remove(f"bad-{name}").status == 200
    assert token_ids(complete(server, "bob", tokens=4)) == expected


@pytest.mark.parametrize(
    ("src", "status"),
    [("/does/not/exist", 424), ("relative/path", 400), ("https://example.com/a.tar.gz", 400), ("hub/model", 400)],
)
def test_a_bad_source_is_refused(server: Server, src: str, status: int) -> None:
    answer = server.add("bad-source", src)
    assert answer.status == status, answer
    assert src in answer.error["message"]
    server.remove("bad-source")


def test_an_archive_that_climbs_out_is_refused(server: Server, tiny: Models, tmp_path: Path) -> None:
    archive = tmp_path / "adapter.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tiny.adapters["ada"] / WEIGHTS, "../../adapter_model.safetensors")
    answer = server.add("climber", archive)
    assert answer.status == 424, answer
    assert ".." in answer.error["message"]
    server.remove("climber")


def test_a_good_archive_is_served(server: Server, tiny: Models, tmp_path: Path) -> None:
    archive = tmp_path / "adapter.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tiny.adapters["ada"], "adapter")
    assert server.add("archived", archive).status == 200
    assert token_ids(complete(server, "archived")) == token_ids(complete(server, "ada"))
    assert server.remove("archived").status == 200
