"""What a person sees when something fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from .conftest import BUCKET, DEMO, ENDPOINT, STORE, Account, Cli

SITE = ("--endpoint", "demo", "--store", STORE)
PIRATE = DEMO / "adapters" / "pirate"
DEPLOY = ("endpoint", "--endpoint", "demo", *ENDPOINT)


def test_quota(cli: Cli, account: Account) -> None:
    account.conduct.quotas["ml.g6e.2xlarge"] = 0
    said = cli(*DEPLOY, ok=False).stderr
    assert "sagemaker:CreateEndpoint failed: ResourceLimitExceeded" in said
    assert "'ml.g6e.2xlarge for endpoint usage' is 0 Instances" in said
    assert "Service Quotas" in said
    account.conduct.quotas.clear()
    cli(*DEPLOY)


@pytest.mark.parametrize(
    ("action", "verb"),
    [
        ("sagemaker:CreateEndpoint", DEPLOY),
        ("sagemaker:DescribeModel", DEPLOY),
        ("s3:PutObject", DEPLOY),
        ("application-autoscaling:DescribeScalableTargets", ("status", "--endpoint", "demo")),
    ],
)
def test_access_denied(cli: Cli, account: Account, action: str, verb: tuple[object, ...]) -> None:
    account.conduct.deny.add(action)
    said = cli(*verb, ok=False).stderr
    assert f"the caller needs {action}" in said
    assert "role --print deployer" in said


def test_a_bucket_that_is_not_there(cli: Cli, account: Account) -> None:
    said = cli(*DEPLOY, "--store", "s3://nowhere/x", ok=False).stderr
    assert "aws s3 mb s3://nowhere" in said


def test_an_endpoint_that_fails_is_made_anew(cli: Cli, account: Account) -> None:
    account.conduct.failing["demo"] = "Unable to provision requested ML compute capacity"
    said = cli(*DEPLOY, ok=False).stderr
    assert "endpoint demo is Failed: Unable to provision" in said
    assert "log group: /aws/sagemaker/Endpoints/demo" in said
    account.conduct.failing.clear()
    assert "failed before (Unable to provision" in cli(*DEPLOY).stderr


def test_a_container_that_does_not_start_shows_its_log(cli: Cli, account: Account) -> None:
    said = cli(*DEPLOY, "--env", "LORAHOST_PROT=1", ok=False).stderr
    assert "base demo-base is Failed: the container ended with exit code" in said
    assert "log group: /aws/sagemaker/InferenceComponents/demo-base" in said
    assert "unknown settings LORAHOST_PROT (did you mean LORAHOST_PORT?)" in said
    cli(*DEPLOY)
    assert account.ask("demo-base") == "base"


def test_a_base_that_fails_with_adapters_says_what_to_do(cli: Cli, deployed: Account) -> None:
    cli("adapter", "add", "pirate", PIRATE, *SITE)
    said = cli(*DEPLOY, "--env", "LORAHOST_PROT=1", ok=False).stderr
    assert "base demo-base is Failed" in said
    assert "remove pirate with `lorahost deploy adapter rm` first" in cli(*DEPLOY, ok=False).stderr
    cli("adapter", "rm", "pirate", *SITE)
    cli(*DEPLOY)
    assert deployed.ask("demo-base") == "base"


def test_a_failed_adapter_is_made_anew(cli: Cli, deployed: Account) -> None:
    deployed.conduct.failing["pirate"] = "something odd"
    said = cli("adapter", "add", "pirate", PIRATE, *SITE, ok=False).stderr
    assert "adapter pirate is Failed: something odd" in said
    assert "log group: /aws/sagemaker/InferenceComponents/demo-base" in said
    deployed.conduct.failing.clear()
    cli("adapter", "add", "pirate", PIRATE, *SITE)
    assert deployed.ask("pirate").startswith("pirate-")


def test_a_full_server_says_how_full(cli: Cli, account: Account) -> None:
    cli(*DEPLOY, "--env", "LORAHOST_MAX_ADAPTERS=1")
    cli("adapter", "add", "pirate", PIRATE, *SITE)
    said = cli("adapter", "add", "shout", DEMO / "adapters" / "shout", *SITE, ok=False).stderr
    assert "adapter shout is Failed: the container answered 507" in said
    assert account.ask("pirate").startswith("pirate-")


def test_an_archive_that_is_gone(cli: Cli, deployed: Account) -> None:
    cli("adapter", "add", "pirate", PIRATE, *SITE)
    [archive] = [key for key in deployed.stored() if key.endswith(".tar.gz")]
    before = deployed.ask("pirate")
    cli("adapter", "update", "pirate", DEMO / "adapters" / "poet", *SITE)
    deployed.client("s3").delete_object(Bucket=BUCKET, Key=archive)
    said = cli("adapter", "rollback", "pirate", *SITE, ok=False).stderr
    assert f"Could not access the artifact at s3://{BUCKET}/{archive}" in said
    cli("adapter", "update", "pirate", PIRATE, *SITE)
    assert deployed.ask("pirate").partition("@")[2] == before.partition("@")[2]


def test_bad_adapters_are_refused_before_anything_is_sent(cli: Cli, deployed: Account, tmp_path: Path) -> None:
    before = deployed.stored()
    broken = tmp_path / "all" / "broken"
    shutil.copytree(PIRATE, broken)
    (broken / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    said = cli("adapter", "add", "broken", broken, *SITE, ok=False).stderr
    assert "adapter broken" in said
    assert "adapter_model.safetensors" in said
    said = cli("adapter", "add", "pirate", PIRATE, *SITE, "--max-rank", "2", ok=False).stderr
    assert "max_lora_rank is 2" in said
    config = json.loads((PIRATE / "adapter_config.json").read_text())
    shutil.copytree(PIRATE, tmp_path / "all" / "dora")
    (tmp_path / "all" / "dora" / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    shutil.copytree(PIRATE, tmp_path / "all" / "good")
    said = cli("adapter", "sync", "--dir", tmp_path / "all", *SITE, "--yes", ok=False).stderr
    assert "nothing was changed" in said
    assert "adapter broken" in said
    assert "adapter dora" in said
    assert "adapter good" not in said
    assert deployed.stored() == before
    assert list(deployed.local.world.components) == ["demo-base"]


def test_the_deployed_servers_rank_is_the_limit(cli: Cli, account: Account) -> None:
    cli(*DEPLOY, "--env", "SM_VLLM_MAX_LORA_RANK=1")
    assert "max_lora_rank is 1" in cli("adapter", "add", "pirate", PIRATE, *SITE, ok=False).stderr


def test_one_failed_adapter_stops_no_other(cli: Cli, deployed: Account, tmp_path: Path) -> None:
    for name in ("pirate", "shout"):
        shutil.copytree(DEMO / "adapters" / name, tmp_path / name)
    deployed.conduct.failing["pirate"] = "something odd"
    said = cli("adapter", "sync", "--dir", tmp_path, *SITE, "--yes", ok=False).stderr
    assert "1 of 2 adapters failed" in said
    assert "something odd" in said
    assert deployed.ask("shout").startswith("shout-")


def test_a_name_that_is_taken(cli: Cli, deployed: Account) -> None:
    assert "exists on endpoint demo" in cli("adapter", "add", "demo-base", PIRATE, *SITE, ok=False).stderr
    assert "nothing was removed" in cli("adapter", "rm", "demo-base", *SITE, ok=False).stderr
    cli("adapter", "add", "pirate", PIRATE, *SITE)
    said = cli("adapter", "add", "pirate", DEMO / "adapters" / "poet", *SITE, ok=False).stderr
    assert "use `adapter update`" in said
    assert "use `adapter add`" in cli("adapter", "update", "poet", PIRATE, *SITE, ok=False).stderr


def test_a_wrong_file_names_the_field(cli: Cli, account: Account, tmp_path: Path) -> None:
    file = tmp_path / "endpoint.yaml"
    file.write_text("endpoint: demo\ninstance_typ: ml.g6e.xlarge\ncopies: -1\n")
    said = cli("endpoint", "-f", file, ok=False).stderr
    assert "instance_typ: Extra inputs" in said
    assert "copies: Input should be greater than or equal to 0 (got -1)" in said
    file.write_text("endpoint: demo\n")
    assert "missing: --image, --model, --instance-type" in cli("endpoint", "-f", file, ok=False).stderr


def test_invoking_what_is_not_there(cli: Cli, deployed: Account) -> None:
    said = cli("invoke", "--endpoint", "demo", "--adapter", "gone", "--prompt", "hi", ok=False).stderr
    assert "Inference Component gone of endpoint demo not found" in said
    said = cli("invoke", "--endpoint", "demo", "--prompt", "hi", "--max-tokens", -3, ok=False).stderr
    assert "ModelError" in said
    assert "max_tokens" in said
