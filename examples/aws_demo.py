"""`make demo-aws`: the whole life of an endpoint on this machine, with the commands and clients that AWS gets.

Starts `lorahost local-aws`, deploys the demo's model with three adapters, asks and streams, updates one adapter under
load, scales to zero and back, and tears everything down.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

DEMO = Path(__file__).resolve().parent / "demo"
NAMES = ("pirate", "shout", "poet")
UPDATED, NEW_WEIGHTS = "pirate", "butler"
ENDPOINT, BUCKET = "demo", "lorahost-demo"
STORE = f"s3://{BUCKET}/demo"
IMAGE = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/lorahost:demo"
QUESTION = "Tell me about the sea."
WAKE_S = 600


def deploy(*words: str) -> None:
    """Runs `lorahost deploy ...` as a person would."""
    print(f"\n$ lorahost deploy {shlex.join(words)}", flush=True)
    command = [sys.executable, "-m", "lorahost.cli", "deploy", *words]
    command += ["--poll", "1"]
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(f"it failed with exit code {done.returncode}")


@contextmanager
def local_aws(engine: str) -> Iterator[None]:
    """Starts the local account and points this process's AWS variables at it."""
    command = [sys.executable, "-m", "lorahost.cli", "local-aws", "--port", "0", "--engine", engine]
    print(f"$ {shlex.join(['lorahost', *command[3:]])}")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for _ in range(2):
            line = process.stdout.readline()
            if not line:
                sys.exit("lorahost local-aws did not start")
            print(line, end="")
            os.environ.update(word.split("=", 1) for word in line.split()[1:])
        os.environ["AWS_DEFAULT_REGION"] = os.environ["AWS_REGION"]
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def client(service: str) -> Any:
    """A boto3 client; the variables say where to."""
    return boto3.client(service, config=Config(retries={"max_attempts": 0}, read_timeout=70))


def ask(runtime: Any, component: str) -> tuple[str, str]:
    """One answer: its text and the version that gave it."""
    message = {"role": "user", "content": QUESTION}
    body = json.dumps({"messages": [message], "max_tokens": 60, "temperature": 0})
    answer = runtime.invoke_endpoint(
        EndpointName=ENDPOINT, InferenceComponentName=component, ContentType="application/json", Body=body.encode()
    )
    text = json.loads(answer["Body"].read())["choices"][0]["message"]["content"]
    return text, answer["CustomAttributes"].rpartition("version=")[2]


def show(name: str, text: str) -> None:
    """One answer in the list of answers."""
    title = f"{name:<10}"
    print(textwrap.fill(text, 100, initial_indent=title, subsequent_indent=" " * len(title)))


def show_answers(runtime: Any) -> None:
    """The same question to the base model and to each adapter."""
    print(f'\n"{QUESTION}"')
    for component in (f"{ENDPOINT}-base", *NAMES):
        show(component, ask(runtime, component)[0])


def nearest(text: str, known: dict[str, str]) -> str:
    """Whose answer a text is: not to the letter, as an engine's batches may turn a close decision."""
    return max(known, key=lambda name: difflib.SequenceMatcher(None, text, known[name], autojunk=False).ratio())


def update_under_load(runtime: Any) -> None:
    """New weights for one adapter while requests come in: each answer is by the version that it names."""
    others = {name: ask(runtime, name)[0] for name in (f"{ENDPOINT}-base", *NAMES) if name != UPDATED}
    answers: list[tuple[str, str]] = []
    refused: list[str] = []
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            try:
                answers.append(ask(runtime, UPDATED))
            except ClientError as error:
                refused.append(str(error.response.get("OriginalStatusCode", error)))

    old = ask(runtime, UPDATED)
    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    deploy("adapter", "update", UPDATED, str(DEMO / "adapters" / NEW_WEIGHTS), "--endpoint", ENDPOINT, "--store", STORE)
    new = ask(runtime, UPDATED)
    time.sleep(1)
    stop.set()
    for thread in threads:
        thread.join()
    show("before", old[0])
    show("after", new[0])
    texts = {**others, f"{UPDATED}@{old[1]}": old[0], f"{UPDATED}@{new[1]}": new[0]}
    wrong = [answer for answer in answers if nearest(answer[0], texts) != f"{UPDATED}@{answer[1]}"]
    count = {version: sum(a[1] == version for a in answers) for _, version in (old, new)}
    print(f"under load: {count[old[1]]} answers by {old[1]}, {count[new[1]]} by {new[1]}, {len(wrong)} wrong")
    codes = ", ".join(sorted(set(refused))) or "-"
    print(f"{len(refused)} refused while SageMaker had the adapter unregistered ({codes})")
    if wrong or old[1] == new[1]:
        sys.exit(f"wrong answers: {wrong[:3]}")


def scale_to_zero_and_back(runtime: Any) -> None:
    """No copies, a request that finds none, and the alarm that brings one back."""
    deploy("autoscale", "--endpoint", ENDPOINT, "--min", "0", "--max", "1")
    component = {"InferenceComponentName": f"{ENDPOINT}-base"}
    sagemaker = client("sagemaker")
    sagemaker.update_inference_component_runtime_config(**component, DesiredRuntimeConfig={"CopyCount": 0})
    print("waiting for no copies")
    began, answered, refusals = time.monotonic(), "", set()
    while time.monotonic() - began < WAKE_S:
        copies = sagemaker.describe_inference_component(**component)["RuntimeConfig"]
        if copies == {"DesiredCopyCount": 0, "CurrentCopyCount": 0} or refusals:
            try:
                answered = ask(runtime, NAMES[1])[0]
                break
            except ClientError as error:
                refusals.add(error.response["Error"]["Message"])
        time.sleep(1)
    if not answered:
        sys.exit(f"no copy came back within {WAKE_S} s: {refusals}")
    print(*refusals, f"after {time.monotonic() - began:.0f} s:", sep="\n")
    show(NAMES[1], answered)


def main() -> None:
    """Tells the story."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["vllm", "fake"], default="vllm")
    options = parser.parse_args()
    with local_aws(options.engine):
        where = {"LocationConstraint": os.environ["AWS_REGION"]}
        client("s3").create_bucket(Bucket=BUCKET, CreateBucketConfiguration=where)
        site = ("--endpoint", ENDPOINT, "--store", STORE)
        instance = ("--instance-type", "ml.g6e.2xlarge", "--min-instances", "0")
        deploy("role", "--store", STORE)
        deploy("endpoint", *site, "--image", IMAGE, "--model", str(DEMO / "model"), *instance)
        for name in NAMES:
            deploy("adapter", "add", name, str(DEMO / "adapters" / name), *site)
        runtime = client("sagemaker-runtime")
        show_answers(runtime)
        deploy(
            "invoke",
            "--endpoint",
            ENDPOINT,
            "--adapter",
            NAMES[2],
            "--prompt",
            QUESTION,
            "--max-tokens",
            "60",
            "--stream",
        )
        update_under_load(runtime)
        scale_to_zero_and_back(runtime)
        deploy("status", "--endpoint", ENDPOINT)
        deploy("teardown", *site, "--shared", "--yes")
        left = client("s3").list_objects_v2(Bucket=BUCKET).get("KeyCount", 0)
        print(f"objects left in the bucket: {left}")
        sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
