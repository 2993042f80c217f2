"""The example for the SageMaker SDK v3, script and notebook, run by .venv-deploy's Python against the local account."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from .conftest import IMAGE, STORE, Account

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PYTHON = ROOT / ".venv-deploy" / "bin" / "python"
ROLE = "arn:aws:iam::123456789012:role/lorahost-execution"
ARGUMENTS = ("--image", IMAGE, "--role", ROLE, "--store", STORE, "--poll", "0")

pytestmark = pytest.mark.skipif(not PYTHON.is_file(), reason="no .venv-deploy: run `make deploy-venv`")


def run(account: Account, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the deployment environment's Python in the examples' folder."""
    # a wide screen, so that the SDK's panels break no line
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env = {**kept, "AWS_ENDPOINT_URL": account.local.url, "COLUMNS": "500", **variables}
    return subprocess.run(
        [PYTHON, *arguments], cwd=EXAMPLES, env=env, capture_output=True, text=True, timeout=300, check=False
    )


def assert_nothing_left(account: Account) -> None:
    world = account.local.world
    assert (world.models, world.configs, world.endpoints, world.components) == ({}, {}, {}, {})
    assert account.stored() == []


def test_the_environment_has_the_sdk_and_neither_torch_nor_vllm(account: Account) -> None:
    program = "from importlib import metadata, util\n"
    program += (
        "print(metadata.version('sagemaker-core').split('.')[0], util.find_spec('torch'), util.find_spec('vllm'))"
    )
    assert run(account, "-c", program).stdout.split() == ["2", "None", "None"]


def test_the_script_deploys_asks_and_removes_everything(account: Account) -> None:
    done = run(account, "sagemaker_sdk.py", *ARGUMENTS)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if " | " in line]
    assert [row[0] for row in rows] == ["lorahost-sdk-base", "pirate", "poet", "stream"]
    said = {row[0]: set(row[1].split()) for row in rows}
    assert said["lorahost-sdk-base"] == {"base"}
    for name, text, proof in rows[1:3]:
        [word] = set(text.split())
        identifier, _, version = word.partition("@")
        assert identifier.startswith(f"{name}-")
        assert proof == f"adapter={identifier};version={version}"
    assert said["stream"] == said["pirate"] != said["poet"]
    assert "everything is removed" in done.stdout
    assert_nothing_left(account)


class Once(dict[str, str]):
    """Reasons to fail that are good for one change each: the deletion works."""

    def get(self, name: str, default: str = "") -> str:  # type: ignore[override]
        return self.pop(name, default)


def test_a_failed_adapter_is_reported_and_everything_is_removed(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(account.conduct, "failing", Once(poet="The artifact could not be read"))
    done = run(account, "sagemaker_sdk.py", *ARGUMENTS)
    assert done.returncode != 0
    assert "The artifact could not be read" in done.stderr
    assert_nothing_left(account)


def test_a_name_that_is_taken_is_left_alone(account: Account) -> None:
    variant = {"VariantName": "v", "InstanceType": "ml.g6e.2xlarge", "InitialInstanceCount": 1}
    account.client("sagemaker").create_endpoint_config(
        EndpointConfigName="lorahost-sdk", ProductionVariants=[variant], ExecutionRoleArn=ROLE
    )
    done = run(account, "sagemaker_sdk.py", *ARGUMENTS)
    assert done.returncode != 0
    assert "already exist" in done.stderr
    assert list(account.local.world.configs) == ["lorahost-sdk"]


def test_the_notebook_does_the_same(account: Account, tmp_path: Path) -> None:
    notebook = json.loads((EXAMPLES / "sagemaker_sdk.ipynb").read_text())
    assert notebook["nbformat"] == 4
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in cells] == [([], None)] * len(cells)
    program = tmp_path / "cells.py"
    program.write_text("\n".join("".join(cell["source"]) for cell in cells))
    # Jupyter imports from the notebook's folder
    done = run(account, str(program), IMAGE=IMAGE, ROLE=ROLE, STORE=STORE, POLL_S="0", PYTHONPATH=str(EXAMPLES))
    assert done.returncode == 0, done.stdout + done.stderr
    proofs = [line for line in done.stdout.splitlines() if line.startswith("adapter=")]
    assert [proof.partition("-")[0] for proof in proofs] == ["adapter=;version=base", "adapter=pirate", "adapter=poet"]
    assert done.stdout.count("pirate-") > 60
    assert_nothing_left(account)
