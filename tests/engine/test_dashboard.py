"""The dashboard's queries for vLLM's own metrics, asked of a real Prometheus that scrapes the real engine's server."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tests.fakes.dashboard import prometheus, queries
from tests.fakes.running import Server, wait_for

pytestmark = pytest.mark.engine


def test_the_engines_queries_have_data(server: Server, tmp_path: Path) -> None:
    with prometheus(tmp_path, server.port) as found:
        for _ in range(2):
            assert server.invoke({"prompt": "ab" * 100, "max_tokens": 4}, "ada").status == 200
            made = server.metric("vllm:prefix_cache_queries_total")
            wait_for(lambda made=made: found.value("sum(vllm:prefix_cache_queries_total)") == made, 60, "a scrape")
        engines = [query for query in queries() if query.of_engine]
        assert engines
        for query in engines:
            [(_, value)] = found.ask(query.substituted)
            assert math.isfinite(value), query.expr
