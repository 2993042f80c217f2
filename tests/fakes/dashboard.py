"""The dashboard's queries, and a real Prometheus to ask them."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from .running import ROOT, free_port, wait_for

CONTAINER = ROOT / "container"
DASHBOARD = CONTAINER / "grafana" / "lorahost.json"
# What Grafana puts in for the variables when all adapters are shown; the window is longer than a slow test.
VARIABLES = {"$adapter": ".*", "$__rate_interval": "5m"}
PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True)
class Query:
    """One query of a panel, as it stands in the dashboard."""

    panel: str
    expr: str
    legend: str

    @property
    def substituted(self) -> str:
        """The query as Grafana sends it."""
        text = self.expr
        for name, value in VARIABLES.items():
            text = text.replace(name, value)
        return text

    @property
    def of_engine(self) -> bool:
        """Whether it asks for vLLM's own metrics."""
        return "vllm:" in self.expr

    @property
    def legend_labels(self) -> set[str]:
        """Labels that the legend shows."""
        return set(PLACEHOLDER.findall(self.legend))


def dashboard() -> dict[str, Any]:
    """The dashboard's JSON."""
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def queries() -> list[Query]:
    """All queries of all panels."""
    return [
        Query(panel["title"], target["expr"], target.get("legendFormat", ""))
        for panel in dashboard()["panels"]
        for target in panel["targets"]
    ]


class Prometheus:
    """A running Prometheus; `ask` and `labels` use its HTTP API."""

    def __init__(self, url: str) -> None:
        self._url = url

    def _get(self, path: str, **fields: str) -> Any:
        try:
            with urllib.request.urlopen(f"{self._url}{path}?{urlencode(fields)}", timeout=30) as answer:
                return json.loads(answer.read())["data"]
        except urllib.error.HTTPError as error:
            # the body says what is wrong with the query
            raise AssertionError(f"{fields}: {error.read().decode()}") from error

    def ask(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """An instant query: each series' labels and value; AssertionError when it does not parse."""
        data = self._get("/api/v1/query", query=expr)
        assert data["resultType"] == "vector", expr
        return [(one["metric"], float(one["value"][1])) for one in data["result"]]

    def labels(self, label: str, match: str) -> list[str]:
        """The label's values among series of one metric, as a dashboard variable asks for them."""
        found: list[str] = self._get(f"/api/v1/label/{label}/values", **{"match[]": match})
        return found

    def value(self, expr: str) -> float | None:
        """The value of a query with one series; None without data."""
        found = self.ask(expr)
        return found[0][1] if found else None


def settings(target: str) -> dict[str, Any]:
    """The repository's own prometheus.yml, scraping `target` and more often."""
    found: dict[str, Any] = yaml.safe_load((CONTAINER / "prometheus" / "prometheus.yml").read_text())
    [job] = found["scrape_configs"]
    job["static_configs"] = [{"targets": [target]}]
    found["global"]["scrape_interval"] = "250ms"
    return found


@contextlib.contextmanager
def prometheus(directory: Path, port: int) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the server on `port`; skips the test where none is installed."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus on the PATH: apt-get install --no-install-recommends prometheus")
    directory.mkdir(parents=True, exist_ok=True)
    config, log, own = directory / "prometheus.yml", directory / "prometheus.log", free_port()
    config.write_text(yaml.safe_dump(settings(f"127.0.0.1:{port}")))
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}"]
    command.append(f"--web.listen-address=127.0.0.1:{own}")
    with log.open("wb") as sink, subprocess.Popen(command, stdout=sink, stderr=sink) as process:
        try:
            wait_for(lambda: process.poll() is not None or _ready(own), 60, "Prometheus")
            assert process.poll() is None, log.read_text()
            yield Prometheus(f"http://127.0.0.1:{own}")
        finally:
            process.kill()


def _ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/-/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
