"""A real Prometheus scrapes a server that had some of everything, and has data for each query of the dashboard."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from tests.fakes.dashboard import CONTAINER, Prometheus, Query, dashboard, prometheus, queries
from tests.fakes.running import ADAPTER_HEADER, Server, make_adapter, running, wait_for

# vLLM makes these metrics itself, so that no other engine has them: tests/engine/test_dashboard.py asks for them.
ENGINE_ONLY = {
    "vllm:kv_cache_usage_perc",
    "sum(rate(vllm:prefix_cache_hits_total[$__rate_interval])) / "
    "sum(rate(vllm:prefix_cache_queries_total[$__rate_interval]))",
    "sum(vllm:num_requests_waiting)",
    "sum(increase(vllm:num_preemptions_total[$__rate_interval]))",
}
COUNTERS = [
    f"lorahost_{name}_total"
    for name in (
        *("requests", "tokens", "rejected", "aborted"),
        *("adapter_load_failures", "adapter_residency_changes"),
    )
]
MAX_RUNNING = 2
SCRAPED_S = 60.0


def test_only_these_queries_are_the_engines() -> None:
    assert {query.expr for query in queries() if query.of_engine} == ENGINE_ONLY


def test_panels_are_whole_and_do_not_overlap() -> None:
    board = dashboard()
    [source] = yaml.safe_load((CONTAINER / "grafana/provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    named = [panel["datasource"] for panel in board["panels"]] + [v["datasource"] for v in board["templating"]["list"]]
    assert {(one["type"], one["uid"]) for one in named} == {(source["type"], source["uid"])}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    places = [
        (x, y)
        for at in (panel["gridPos"] for panel in board["panels"])
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(places)) == len(places)
    assert max(x for x, _ in places) < 24


def stream(server: Server, adapter: str | None, tokens: int) -> socket.socket:
    """A connection on which a stream has begun."""
    body = json.dumps({"prompt": "hi", "max_tokens": tokens, "stream": True}).encode()
    head = f"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    named = f"{ADAPTER_HEADER}: {adapter}\r\n" if adapter else ""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(f"{head}{named}\r\n".encode() + body)
    return connection


def some_of_everything(server: Server, source: Path) -> None:
    """Answers, streams, refusals, a client that leaves, adapters that come, go and fail."""
    for adapter in (None, "a1", "a2"):
        assert server.invoke(adapter=adapter).status == 200
        assert server.invoke({"prompt": "hi", "max_tokens": 5, "stream": True}, adapter).status == 200
    assert server.invoke(adapter="nobody").status == 404
    assert server.invoke([]).status == 400
    left = server.metric("lorahost_aborted_total")
    with stream(server, "a1", 4000) as connection:
        assert connection.recv(1)
    wait_for(lambda: server.metric("lorahost_aborted_total") > left, 30, "the client that left")
    assert server.add("m1", source).status == 200
    assert server.remove("m1").status == 200
    assert server.add("m2", source / "nowhere").status == 424


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus, while two streams run and a third waits for admission."""
    directory = tmp_path_factory.mktemp("dashboard")
    for name in ("a1", "a2"):
        make_adapter(directory / "adapters" / name, name)
    source = make_adapter(directory / "m1", "m1")
    env = {"LORAHOST_ADAPTERS_DIR": str(directory / "adapters"), "LORAHOST_MAX_RUNNING": str(MAX_RUNNING)}
    with ExitStack() as stack:
        server = stack.enter_context(running(directory, env, {"fell_back": ["expand"]}))
        found = stack.enter_context(prometheus(directory / "prometheus", server.port))

        def scraped() -> bool:
            """Whether the last scrape has all that happened."""
            return found.value('sum({__name__=~"lorahost_.+_total"})') == sum(map(server.metric, COUNTERS))

        # a rate needs two samples of a series that differ
        for _ in range(2):
            some_of_everything(server, source)
            wait_for(scraped, SCRAPED_S, "a scrape")
        server.engine(step_s=0.05)
        for adapter in ("a1", "a2", None):
            stack.enter_context(stream(server, adapter, 4000))
        wait_for(
            lambda: (found.value("lorahost_running"), found.value("lorahost_queued")) == (MAX_RUNNING, 1),
            SCRAPED_S,
            "streams in a scrape",
        )
        yield found


@pytest.mark.parametrize(
    "query", [query for query in queries() if not query.of_engine], ids=lambda query: f"{query.panel}: {query.legend}"
)
def test_each_query_has_data(watched: Prometheus, query: Query) -> None:
    series = watched.ask(query.substituted)
    assert [value for _, value in series if math.isfinite(value) and value > 0], (query.substituted, series)
    for labels, _ in series:
        assert query.legend_labels <= labels.keys(), query.legend


def test_the_adapter_variable_lists_adapters(watched: Prometheus) -> None:
    [variable] = dashboard()["templating"]["list"]
    assert (variable["name"], variable["query"]) == ("adapter", "label_values(lorahost_requests_total, adapter)")
    assert {"a1", "a2", "base"} <= set(watched.labels("adapter", "lorahost_requests_total"))
    of_a1 = [query.expr for query in queries() if "$adapter" in query.expr and "by (adapter)" in query.expr]
    for expr in of_a1:
        series = watched.ask(expr.replace("$adapter", "a1").replace("$__rate_interval", "5m"))
        assert [labels for labels, _ in series] == [{"adapter": "a1"}], expr


def test_a_query_that_does_not_parse_fails(watched: Prometheus) -> None:
    with pytest.raises(AssertionError, match="parse error"):
        watched.ask("sum by (code) (rate(lorahost_requests_total[5m])")
