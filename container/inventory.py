"""Writes what the image holds, while it is built: `sbom.cdx.json` (CycloneDX 1.6) and `licenses.txt`.

Only the standard library is used and the image's own Python runs it, so that it sees the packages of the base image
too and leaves nothing behind: Python distributions by their metadata, Debian's and Ubuntu's packages by dpkg.
`inventory.py --name NAME [--out DIR]`; the same packages give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import textwrap
import uuid
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

UNDECLARED = "not declared"
OS_RELEASE = Path("/etc/os-release")
CLASSIFIER = "License :: "
# a licence given as a whole text is cut to its first line, and each to this many characters
MAX_NAME = 200


@dataclass(frozen=True, slots=True, order=True)
class Package:
    """One installed package. `expression` says that `license` is an SPDX expression."""

    purl: str
    name: str
    version: str
    license: str
    expression: bool
    texts: tuple[str, ...]


def python_license(about: metadata.PackageMetadata) -> tuple[str, bool]:
    """Licence as declared: an SPDX expression, else the field, else the classifiers."""
    if "License-Expression" in about:
        return about["License-Expression"], True
    lines = about["License"].strip().splitlines() if "License" in about else []
    if lines and lines[0].upper() != "UNKNOWN":
        return textwrap.shorten(lines[0], MAX_NAME, placeholder=" ..."), False
    classes = [c.rpartition(" :: ")[2] for c in about.get_all("Classifier") or () if c.startswith(CLASSIFIER)]
    return (", ".join(classes), False) if classes else (UNDECLARED, False)


def python_packages() -> list[Package]:
    """Distributions on the path; of two of one name the first, which is the one that is imported."""
    found: dict[str, Package] = {}
    for dist in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", dist.name).lower()
        if name in found:
            continue
        texts = [p for p in dist.files or () if re.match(r"(?i)licen[cs]e|copying|notice", p.name)]
        declared, expression = python_license(dist.metadata)
        located = tuple(sorted(str(Path(str(p.locate())).resolve()) for p in texts if ".dist-info" in str(p)))
        version = quote(dist.version, safe=".-_~")
        found[name] = Package(f"pkg:pypi/{name}@{version}", name, dist.version, declared, expression, located)
    return list(found.values())


def system_packages() -> list[Package]:
    """Packages of dpkg, which declares licences only in `copyright` files."""
    if shutil.which("dpkg-query") is None:
        return []
    shown = "--showformat=${binary:Package} ${Version} ${Architecture}\\n"
    listed = subprocess.run(["dpkg-query", "--show", shown], capture_output=True, text=True, check=True).stdout
    system = re.search(r"^ID=\"?([\w.-]+)", OS_RELEASE.read_text(), re.MULTILINE)
    vendor = system.group(1) if system else "debian"
    packages = []
    for line in listed.splitlines():
        name, version, architecture = line.split()
        name = name.partition(":")[0]
        purl = f"pkg:deb/{vendor}/{quote(name)}@{quote(version, safe='.-_~')}?arch={architecture}"
        text = Path("/usr/share/doc") / name / "copyright"
        packages.append(Package(purl, name, version, *copyright_licenses(text)))
    return packages


def copyright_licenses(path: Path) -> tuple[str, bool, tuple[str, ...]]:
    """The short names in a `copyright` file of Debian's machine-readable form, and the file."""
    if not path.is_file():
        return UNDECLARED, False, ()
    text = path.read_text(errors="replace")
    names = re.findall(r"^License:[ \t]*(\S.*)$", text, re.MULTILINE) if text.startswith("Format:") else []
    unique = ", ".join(dict.fromkeys(name.strip() for name in names))
    shown = textwrap.shorten(unique, MAX_NAME, placeholder=" ...") if unique else "see its copyright file"
    return shown, False, (str(path),)


def component(package: Package) -> dict[str, Any]:
    """One entry of the SBOM."""
    entry = {"type": "library", "bom-ref": package.purl, "name": package.name, "version": package.version}
    if package.license == UNDECLARED:
        return {**entry, "purl": package.purl}
    declared = {"expression": package.license} if package.expression else {"license": {"name": package.license}}
    return {**entry, "purl": package.purl, "licenses": [declared]}


def bom(name: str, version: str, packages: list[Package]) -> dict[str, Any]:
    """The CycloneDX document; its serial number follows from its content."""
    image = {"type": "container", "bom-ref": name, "name": name, "version": version}
    serial = uuid.uuid5(uuid.NAMESPACE_URL, "\n".join([name, version, *(p.purl for p in packages)]))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": image},
        "components": [component(package) for package in packages],
    }


def license_list(packages: list[Package]) -> str:
    """One line a package: name, version, licence, where the texts are in the image."""
    head = "package\tversion\tlicence as declared\ttexts\n"
    return head + "".join(f"{p.name}\t{p.version}\t{p.license}\t{' '.join(p.texts) or '-'}\n" for p in packages)


def main() -> None:
    """Writes both files and says what they hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True, help="the image's name in the SBOM")
    parser.add_argument("--out", type=Path, default=Path.cwd())
    options = parser.parse_args()
    packages = sorted([*python_packages(), *system_packages()])
    document = bom(options.name, metadata.version("lorahost"), packages)
    (options.out / "sbom.cdx.json").write_text(json.dumps(document, indent=1) + "\n")
    (options.out / "licenses.txt").write_text(license_list(packages))
    undeclared = [package.name for package in packages if package.license == UNDECLARED]
    print(f"{len(packages)} packages, {len(undeclared)} without a declared licence: {' '.join(undeclared) or 'none'}")


if __name__ == "__main__":
    main()
