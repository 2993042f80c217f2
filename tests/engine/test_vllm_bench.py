"""vLLM's own load generator against our port.

`vllm bench serve` itself asks for the version of a package named `vllm`, which the CPU engine's package is not; what it
runs is called directly here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engine.conftest import Models
from tests.fakes.running import Server

pytestmark = pytest.mark.engine
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def test_vllm_bench_serve_runs_over_adapters(server: Server, tiny: Models, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-c", BENCH_SERVE),
        *("--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions"),
        *("--model", "tiny", "--tokenizer", str(tiny.base), "--dataset-name", "random"),
        *("--random-input-len", "16", "--random-output-len", "8", "--num-prompts", "12", "--ignore-eos"),
        *("--lora-modules", "ada", "bob", "cy", "--lora-assignment", "round-robin"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 12
    assert result["total_output_tokens"] == 12 * 8
    for name in ("ada", "bob", "cy"):
        assert f'lorahost_requests_total{{adapter="{name}",code="200"}}' in server.get("/metrics").body.decode()
