"""The whole story through the command line: deploy, add, invoke, update, roll back, scale, tear down."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from .conftest import BUCKET, DEMO, ENDPOINT, STORE, Account, Cli

SITE = ("--endpoint", "demo", "--store", STORE)


def test_deploys_invokes_updates_rolls_back_scales_and_leaves_nothing(cli: Cli, account: Account) -> None:
    cli("role", "--store", STORE)
    cli("endpoint", "--endpoint", "demo", *ENDPOINT, "--max-instances", "2")
    assert account.component("demo-base")["RuntimeConfig"] == {"DesiredCopyCount": 1, "CurrentCopyCount": 1}
    for name in ("pirate", "shout"):
        cli("adapter", "add", name, DEMO / "adapters" / name, *SITE)
    first = account.ask("pirate")
    assert first.startswith("pirate-")
    assert account.ask("shout").startswith("shout-")
    assert account.ask("demo-base") == "base"
    listed = cli("adapter", "ls", "--endpoint", "demo").stdout.splitlines()
    assert [line.split()[:2] for line in listed[1:]] == [["pirate", "InService"], ["shout", "InService"]]

    cli("adapter", "update", "pirate", DEMO / "adapters" / "poet", *SITE)
    second = account.ask("pirate")
    assert second != first
    assert second.split("@")[0] == first.split("@")[0]
    cli("adapter", "rollback", "pirate", *SITE)
    assert account.ask("pirate") == first
    assert "first version" in cli("adapter", "rollback", "pirate", *SITE, ok=False).stderr

    said = cli("invoke", "--endpoint", "demo", "--adapter", "shout", "--prompt", "hi", "--max-tokens", 3)
    streamed = cli(
        "invoke", "--endpoint", "demo", "--adapter", "shout", "--prompt", "hi", "--max-tokens", 3, "--stream"
    )
    assert said.stdout.split() == streamed.stdout.split() == [account.ask("shout")] * 3
    assert "adapter=shout" in said.stderr

    cli("autoscale", "--endpoint", "demo", "--min", 2, "--max", 2)
    rows = json.loads(cli("status", "--endpoint", "demo", "--json").stdout)
    assert [row["kind"] for row in rows] == [
        "model", "configuration", "endpoint", "base", "adapter", "adapter", "autoscaling",
    ]  # fmt: skip
    cli("endpoint", "--endpoint", "demo", *ENDPOINT, "--max-instances", "2", "--copies", "2")
    assert account.component("demo-base")["RuntimeConfig"]["CurrentCopyCount"] == 2
    assert {account.ask("pirate") for _ in range(4)} == {first}

    cli("teardown", "--endpoint", "demo", "--store", STORE, "--shared", "--yes")
    world = account.local.world
    assert (world.models, world.configs, world.endpoints, world.components) == ({}, {}, {}, {})
    assert (world.targets, world.policies) == ({}, {})
    assert account.stored() == []
    assert account.client("iam").list_roles()["Roles"] == []


def test_an_update_under_load_gives_no_wrong_answer(cli: Cli, deployed: Account) -> None:
    cli("adapter", "add", "pirate", DEMO / "adapters" / "pirate", *SITE)
    cli("adapter", "add", "shout", DEMO / "adapters" / "shout", *SITE)
    before = deployed.ask("pirate")
    answers: list[tuple[str, str]] = []
    refused: list[ClientError] = []
    done = threading.Event()

    def load(name: str) -> None:
        while not done.is_set():
            try:
                answers.append((name, deployed.ask(name)))
            except ClientError as error:
                refused.append(error)

    threads = [threading.Thread(target=load, args=(name,)) for name in ("pirate", "shout")]
    for thread in threads:
        thread.start()
    cli("adapter", "update", "pirate", DEMO / "adapters" / "poet", *SITE)
    after = deployed.ask("pirate")
    done.set()
    for thread in threads:
        thread.join()
    given = {name: {said for who, said in answers if who == name} for name in ("pirate", "shout")}
    assert before != after
    assert before in given["pirate"] <= {before, after}
    assert given["shout"] == {deployed.ask("shout")}
    # SageMaker unregisters before it registers: in between the adapter is unknown, and says so
    assert {error.response["OriginalStatusCode"] for error in refused} <= {404}
    assert {"pirate" in error.response["OriginalMessage"] for error in refused} <= {True}


def test_sync_shows_a_plan_and_follows_it(cli: Cli, deployed: Account, tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    for name in ("pirate", "shout", "poet"):
        shutil.copytree(DEMO / "adapters" / name, folder / name)
    first = cli("adapter", "sync", "--dir", folder, *SITE, "--yes")
    assert [line.split()[:2] for line in first.stderr.splitlines()[1:4]] == [
        ["add", "pirate"], ["add", "poet"], ["add", "shout"],
    ]  # fmt: skip
    shutil.rmtree(folder / "poet")
    shutil.rmtree(folder / "shout")
    shutil.copytree(DEMO / "adapters" / "butler", folder / "shout")
    shutil.copytree(DEMO / "adapters" / "butler", folder / "butler")
    before = deployed.ask("shout")
    second = cli("adapter", "sync", "--dir", folder, *SITE, "--yes")
    assert [line.split()[:2] for line in second.stderr.splitlines()[1:5]] == [
        ["add", "butler"], ["keep", "pirate"], ["update", "shout"], ["remove", "poet"],
    ]  # fmt: skip
    assert deployed.ask("shout") != before
    with pytest.raises(ClientError, match="not found"):
        deployed.ask("poet")
    assert "nothing to do" in cli("adapter", "sync", "--dir", folder, *SITE, "--yes").stderr
    file = tmp_path / "state.yaml"
    file.write_text(f"endpoint: demo\nstore: {STORE}\nadapters:\n  pirate: adapters/pirate\n")
    third = cli("adapter", "sync", "-f", file, "--yes")
    assert sorted(line.split()[0] for line in third.stderr.splitlines()[1:4]) == ["keep", "remove", "remove"]
    assert [k for k in deployed.stored() if k.endswith("history.json")] == ["lorahost/adapters/pirate/history.json"]


def test_scales_to_zero_and_wakes(cli: Cli, account: Account) -> None:
    cli("endpoint", "--endpoint", "demo", *ENDPOINT)
    assert "--min-instances 0" in cli("autoscale", "--endpoint", "demo", "--min", 0, ok=False).stderr
    cli("endpoint", "--endpoint", "demo", *ENDPOINT, "--min-instances", 0, "--copies", 1)
    cli("adapter", "add", "pirate", DEMO / "adapters" / "pirate", *SITE)
    said = account.ask("pirate")
    cli("autoscale", "--endpoint", "demo", "--min", 0, "--max", 1)
    account.client("sagemaker").update_inference_component_runtime_config(
        InferenceComponentName="demo-base", DesiredRuntimeConfig={"CopyCount": 0}
    )
    wait(account, 0)
    with pytest.raises(ClientError, match="no copies"):
        account.ask("pirate")
    wait(account, 1)
    assert account.ask("pirate") == said
    cli("autoscale", "--endpoint", "demo", "--min", 1, "--max", 1)
    assert account.client("cloudwatch").describe_alarms()["MetricAlarms"] == []
    assert [policy["PolicyName"] for policy in account.local.world.policies.values()] == ["demo-base-concurrency"]
    cli("autoscale", "--endpoint", "demo", "--off")
    assert account.local.world.targets == {}


def wait(account: Account, copies: int) -> None:
    """Waits until the base model has so many copies."""
    pause = threading.Event()
    for _ in range(400):
        found = account.component("demo-base")
        if found["InferenceComponentStatus"] == "InService" and found["RuntimeConfig"]["CurrentCopyCount"] == copies:
            return
        pause.wait(0.05)
    raise AssertionError(f"{copies} copies were not there in time: {found}")


def test_builds_the_image(cli: Cli, account: Account) -> None:
    cli("role", "--store", STORE)
    result = cli(
        "image", "--source", "https://github.com/owner/lorahost", "--revision", "abc123", "--store", STORE
    )  # fmt: skip
    assert result.stdout.strip() == "123456789012.dkr.ecr.eu-west-1.amazonaws.com/lorahost:abc123"
    [repository] = account.client("ecr").describe_repositories()["repositories"]
    assert repository["imageTagMutability"] == "IMMUTABLE"
    [project] = account.client("codebuild").batch_get_projects(names=["lorahost-image"])["projects"]
    assert (project["artifacts"]["type"], project["artifacts"]["location"]) == ("S3", BUCKET)
    assert BUCKET in cli("role", "--store", STORE, "--print", "deployer").stdout
