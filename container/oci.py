"""buildah and podman for `image_test.py`: a store of images of its own, and containers as short-lived objects."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
PYTHON = "/opt/lorahost/bin/python"
# seconds; the first build downloads torch
BUILD_S = 3600
# the most that a container asks of the host's limits
LIMITS = {"nofile": (resource.RLIMIT_NOFILE, 65536), "nproc": (resource.RLIMIT_NPROC, 32768)}


class CheckError(Exception):
    """A check that does not hold, or a tool that is missing or failed."""


def need(*tools: str) -> None:
    """Raises:
    CheckError: a tool is not on PATH; the message says how to get it.
    """
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        packages = " ".join("npm" if tool == "npx" else tool for tool in missing)
        raise CheckError(f"{', '.join(missing)} not found on PATH (Debian: apt-get install {packages})")


def output(command: Sequence[str], timeout_s: float = 120, ok: Sequence[int] = (0,)) -> str:
    """Standard output of a command.

    Raises:
        CheckError: it took too long or ended otherwise than with one of `ok`.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as late:
        raise CheckError(f"{' '.join(command)}: no end within {timeout_s:.0f} s") from late
    if done.returncode not in ok:
        said = (done.stderr + done.stdout).strip()[-4000:]
        raise CheckError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Store:
    """Where images, layers and containers of the test lie; nothing of the user's own store is touched."""

    directory: Path

    @property
    def flags(self) -> list[str]:
        """For buildah and podman alike."""
        driver = os.environ.get("STORAGE_DRIVER", "overlay")
        places = ["--root", str(self.directory / "root"), "--runroot", str(self.directory / "run")]
        return [*places, "--storage-driver", driver]

    def buildah(self, *words: str, timeout_s: float = 120) -> str:
        """Runs buildah on this store."""
        return output(["buildah", *self.flags, *words], timeout_s)

    def podman(self, *words: str, timeout_s: float = 120, ok: Sequence[int] = (0,)) -> str:
        """Runs podman on this store."""
        return output([*self.podman_command(), *words], timeout_s, ok)

    def once(self, *words: str, ok: Sequence[int] = (0,)) -> str:
        """Standard output of a container that ends by itself."""
        return self.podman("run", "--rm", "--network", "none", *limits(), *words, ok=ok)

    def podman_command(self) -> list[str]:
        """podman with what it takes on hosts without systemd, or with old control groups."""
        runtime = ["--runtime", "runc"] if shutil.which("runc") else []
        groups = [] if Path("/run/systemd/system").is_dir() else ["--cgroup-manager", "cgroupfs"]
        return ["podman", *self.flags, *runtime, *groups]

    def has(self, image: str) -> bool:
        """Whether an image is in the store."""
        return image in self.buildah("images", "--all", "--format", "{{.Name}}:{{.Tag}}").split()

    def build(self, tag: str, *, base: str, context: Path = ROOT, target: str = "", revision: str = "") -> None:
        """Builds one target on a base. The build trusts the authorities that the host trusts."""
        words = ["bud", "--layers", "--isolation", "chroot", "--network", "host", "--format", "docker"]
        if AUTHORITIES.is_file():
            words += ["--volume", f"{AUTHORITIES}:{AUTHORITIES}:ro"]
        words += ["--target", target] if target else []
        words += ["--build-arg", f"REVISION={revision}"] if revision else []
        self.buildah(*words, "--build-arg", f"BASE_IMAGE={base}", "--tag", tag, str(context), timeout_s=BUILD_S)

    def inspect(self, image: str) -> dict[str, Any]:
        """What podman knows of an image."""
        [about] = json.loads(self.podman("image", "inspect", image))
        return dict(about)


def limits() -> list[str]:
    """Flags that keep a container within what this host grants; podman's own default may be more."""
    flags = []
    for name, (kind, most) in LIMITS.items():
        hard = resource.getrlimit(kind)[1]
        value = most if hard == resource.RLIM_INFINITY else min(hard, most)
        flags += ["--ulimit", f"{name}={value}:{value}"]
    return flags


@dataclass(frozen=True, slots=True)
class Container:
    """One running container."""

    store: Store
    image: str
    id: str

    def client(self, *words: str) -> list[str]:
        """Command line of a second container in this one's network, which runs `image_client.py`."""
        script = f"{ROOT / 'container' / 'image_client.py'}:/client.py:ro"
        place = ["--network", f"container:{self.id}", "--volume", script, "--entrypoint", PYTHON]
        return [*self.store.podman_command(), "run", "--rm", *limits(), *place, self.image, "/client.py", *words]

    def stop(self) -> None:
        """Tells it to stop, as the platform does."""
        self.store.podman("kill", "--signal", "TERM", self.id)

    def wait(self, timeout_s: float) -> int:
        """Its exit code."""
        return int(self.store.podman("wait", self.id, timeout_s=timeout_s))

    def log(self, lines: int = 40) -> str:
        """The end of its log."""
        command = [*self.store.podman_command(), "logs", "--tail", str(lines), self.id]
        return subprocess.run(command, text=True, stdout=-1, stderr=subprocess.STDOUT, check=False).stdout


@contextmanager
def running(store: Store, image: str, *flags: str, arguments: Sequence[str] = ("serve",)) -> Iterator[Container]:
    """A container without a network and with a read-only root; removed at the end, its log shown on a failure."""
    strict = ["--network", "none", "--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp"]
    name = store.podman("run", "--detach", *limits(), *strict, *flags, image, *arguments).strip()
    container = Container(store, image, name)
    try:
        yield container
    except CheckError as failure:
        raise CheckError(f"{failure}\nthe end of the container's log:\n{container.log()}") from failure
    finally:
        store.podman("rm", "--force", "--time", "0", name)
