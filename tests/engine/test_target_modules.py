"""An engine that wraps some modules only: an adapter on others is refused, never served without a part of itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.conftest import Models, start_server
from tests.engine.test_server import PROMPT, check_parity, complete
from tests.engine.tiny_models import AdapterSpec, Reference, build_adapter
from tests.fakes.running import Server

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def experts_only(tiny: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("experts_only")
    running = start_server(directory, tiny, SM_VLLM_LORA_TARGET_MODULES='["experts"]')
    yield running
    running.stop()


def test_an_adapter_on_the_experts_alone_is_served(experts_only: Server, tiny: Models, tmp_path: Path) -> None:
    path = build_adapter(tiny.base, tmp_path / "experts", AdapterSpec("experts", 4, 8, attention=False), seed=41)
    assert experts_only.add("experts", path).status == 200
    check_parity(complete(experts_only, "experts"), Reference(tiny.base, path), PROMPT)


@pytest.mark.parametrize("name", ["ada", "all"])
def test_an_adapter_on_other_modules_is_refused_with_their_names(experts_only: Server, tiny: Models, name: str) -> None:
    answer = experts_only.add(name, tiny.adapters[name])
    assert answer.status == 424, answer
    assert "q_proj" in answer.error["message"], answer.error
    invoked = experts_only.invoke(adapter=name)
    assert invoked.status in (404, 424), invoked
