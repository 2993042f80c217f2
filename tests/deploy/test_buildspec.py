"""Runs the lines of `buildspec.yml` in one shell, as CodeBuild does, with stand-ins for all that they call."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/lorahost"
REVISION = "4f2c9a61d0b37e58f1a2c3d4e5f60718293a4b5c"
DIGEST = "sha256:" + "ab" * 32
DOCKER_V2 = "application/vnd.docker.distribution.manifest.v2+json"
TOOLS = ("aws", "docker", "make", "npx", "curl")
STANDIN = """#!{python} -SE
import json, os, sys
from pathlib import Path
words = [Path(sys.argv[0]).name, *sys.argv[1:]]
given = "" if "--password-stdin" not in words else sys.stdin.read()
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps([words, given]), file=calls)
line = " ".join(words)
for part, (code, text) in json.loads(os.environ["ANSWERS"]).items():
    if part in line:
        print(text)
        sys.exit(code)
"""
# what a stand-in prints and ends with when its command line contains the key; the first that fits
ANSWERS: dict[str, tuple[int, str]] = {
    "get-login-password": (0, "a-password"),
    "batch-get-image": (0, "0"),
    "tagStatus=TAGGED": (0, "old-revision"),
    "imageTag=": (0, f"{DOCKER_V2}\t{DIGEST}\t9876543210"),
    "docker inspect": (0, "0"),
}


@dataclass
class Outcome:
    """How a build ended."""

    code: int
    output: str
    calls: list[list[str]] = field(default_factory=list)
    stdin: list[str] = field(default_factory=list)
    artifact: dict[str, Any] | None = None

    def made(self, *words: str) -> list[list[str]]:
        """The calls that have all these words."""
        return [call for call in self.calls if all(word in call for word in words)]

    @property
    def pushes(self) -> list[list[str]]:
        """Builds that push."""
        return [call for call in self.calls if any("push=true" in word for word in call)]


def commands() -> list[str]:
    """All commands of all phases, in CodeBuild's order."""
    phases = yaml.safe_load((ROOT / "buildspec.yml").read_text())["phases"]
    return [line for name in ("install", "pre_build", "build", "post_build") for line in lines(phases, name)]


def lines(phases: dict[str, Any], name: str) -> list[str]:
    return list(phases.get(name, {}).get("commands", []))


def variables() -> dict[str, str]:
    given: dict[str, str] = yaml.safe_load((ROOT / "buildspec.yml").read_text())["env"]["variables"]
    return given


def build(folder: Path, answers: dict[str, tuple[int, str]] | None = None, **environ: str) -> Outcome:
    """One build: the first command that fails ends it."""
    given = answers or {}
    tools, source = folder / "bin", folder / "source"
    tools.mkdir()
    source.mkdir()
    for tool in TOOLS:
        path = tools / tool
        path.write_text(STANDIN.format(python=sys.executable))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    # after the stand-ins only the shell's own helpers: nothing real of the same name can answer
    (tools / "cat").symlink_to("/bin/cat")
    script = "".join(f"{{ {line.strip()}\n}} || {{ echo failed: line {n} >&2; exit 1; }}\n" for n, line in numbered())
    calls = folder / "calls"
    calls.touch()
    done = subprocess.run(
        ["/bin/bash", "-c", script],
        cwd=source,
        env={
            "PATH": str(tools),
            "CALLS": str(calls),
            "ANSWERS": json.dumps(given | {part: told for part, told in ANSWERS.items() if part not in given}),
            "IMAGE_REPOSITORY": REPOSITORY,
            "CODEBUILD_RESOLVED_SOURCE_VERSION": REVISION,
            **variables(),
            **environ,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    made = [json.loads(line) for line in calls.read_text().splitlines()]
    artifact = source / "image.json"
    return Outcome(
        done.returncode,
        done.stdout,
        [call for call, _ in made],
        [given for _, given in made if given],
        json.loads(artifact.read_text()) if artifact.exists() else None,
    )


def numbered() -> list[tuple[int, str]]:
    return list(enumerate(commands(), 1))


def test_a_build_checks_builds_tries_pushes_and_reports(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert done.code == 0, done.output
    assert done.artifact == {
        "image": f"{REPOSITORY}@{DIGEST}",
        "tag": REVISION,
        "digest": DIGEST,
        "media_type": DOCKER_V2,
        "bytes": 9876543210,
    }
    assert yaml.safe_load((ROOT / "buildspec.yml").read_text())["artifacts"]["files"] == ["image.json"]
    order = [" ".join(call[:3]) for call in done.calls]
    tried = ["docker buildx build", "docker run --detach", "curl --fail --silent", "docker stop --time"]
    steps = ["npx --yes dockerfilelint@1.8.0", "make test", *tried, "docker buildx build", "aws ecr describe-images"]
    positions = []
    for step in steps:
        positions.append(order.index(step, positions[-1] + 1 if positions else 0))
    assert positions == sorted(positions)


def test_the_push_has_docker_media_types_one_platform_a_cache_and_the_revision_as_tag(tmp_path: Path) -> None:
    done = build(tmp_path)
    [push] = done.pushes
    assert "--provenance=false" in push
    assert "--sbom=false" in push
    assert push[push.index("--platform") + 1] == "linux/amd64"
    assert push[push.index("--target") + 1] == "gpu"
    assert push[push.index("--output") + 1] == (
        f"type=image,name={REPOSITORY}:{REVISION},push=true,oci-mediatypes=false"
    )
    assert push[push.index("--cache-from") + 1] == f"type=registry,ref={REPOSITORY}:old-revision"
    assert push[push.index("--cache-to") + 1] == "type=inline"
    assert push[push.index("--build-arg") + 1] == f"REVISION={REVISION}"
    assert push[-1] == "."
    assert not any("BASE_IMAGE" in word for word in push)


def test_the_password_goes_through_standard_input_only(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert done.stdin == ["a-password\n"]
    assert done.made("docker", "login", REPOSITORY.partition("/")[0])
    assert not any("a-password" in word for call in done.calls for word in call)
    assert "a-password" not in done.output


def test_what_is_tried_is_what_is_pushed(tmp_path: Path) -> None:
    first, second = build(tmp_path).made("docker", "buildx", "build")
    assert first[first.index("--load") :] == ["--load", "--tag", "lorahost:built", "."]
    assert first[: first.index("--load")] == second[: second.index("--cache-to")]


def test_the_first_build_has_no_cache_and_a_base_can_be_named(tmp_path: Path) -> None:
    base = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/docker-hub/vllm/vllm-openai:v0.26.0"
    done = build(tmp_path, {"tagStatus=TAGGED": (0, "None")}, BASE_IMAGE=base, TARGET="cpu")
    assert done.code == 0, done.output
    [push] = done.pushes
    assert "--cache-from" not in push
    assert f"BASE_IMAGE={base}" in push
    assert push[push.index("--target") + 1] == "cpu"


def test_a_revision_that_is_there_is_not_built_again_but_still_judged(tmp_path: Path) -> None:
    done = build(tmp_path, {"batch-get-image": (0, "1")})
    assert done.code == 0, done.output
    assert done.made("docker", "buildx", "build") == []
    assert done.artifact is not None
    assert done.artifact["digest"] == DIGEST


@pytest.mark.parametrize("kind", ["manifest", "index"])
def test_an_oci_manifest_fails_the_build(tmp_path: Path, kind: str) -> None:
    media_type = f"application/vnd.oci.image.{kind}.v1+json"
    done = build(tmp_path, {"batch-get-image": (0, "0"), "imageTag=": (0, f"{media_type}\t{DIGEST}\t1")})
    assert done.code == 1
    assert f"manifest of type {media_type}, which SageMaker refuses" in done.output
    assert done.artifact is None


@pytest.mark.parametrize(
    ("answers", "never"),
    [
        ({"get-login-password": (254, "")}, "login"),
        ({"docker login": (1, "")}, "make"),
        ({"npx": (1, "")}, "make"),
        ({"make test": (2, "")}, "buildx"),
        ({"batch-get-image": (254, "AccessDenied")}, "make"),
        ({"buildx create": (1, "")}, "build"),
        ({"--load": (1, "")}, "run"),
        ({"curl": (22, "")}, "stop"),
        ({"docker inspect": (0, "137")}, "push"),
        ({"push=true": (1, "denied")}, "--image-ids"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_what_fails_ends_the_build_and_nothing_is_pushed(
    tmp_path: Path, answers: dict[str, tuple[int, str]], never: str
) -> None:
    done = build(tmp_path, answers)
    assert done.code == 1, done.output
    assert done.artifact is None
    assert done.pushes == [] or "push=true" in answers
    last = done.calls[-1]
    assert any(part in " ".join(last) for part in answers), last
    assert never not in last


def test_an_image_that_is_not_described_fails_the_build(tmp_path: Path) -> None:
    done = build(tmp_path, {"batch-get-image": (0, "0"), "imageTag=": (254, "ImageNotFoundException")})
    assert done.code == 1
    assert done.artifact is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"IMAGE_REPOSITORY": ""}, "IMAGE_REPOSITORY is not set"),
        ({"CODEBUILD_RESOLVED_SOURCE_VERSION": ""}, "can't be an image tag"),
        ({"CODEBUILD_RESOLVED_SOURCE_VERSION": "feature/x y"}, "'feature/x y' can't be an image tag"),
    ],
)
def test_without_a_repository_or_a_revision_nothing_is_called(
    tmp_path: Path, environ: dict[str, str], message: str
) -> None:
    done = build(tmp_path, **environ)
    assert done.code == 1
    assert message in done.output
    assert done.calls == []


def test_the_deployment_sets_what_the_buildspec_reads() -> None:
    source = (ROOT / "deploy" / "lorahost_deploy" / "image.py").read_text()
    assert '"IMAGE_REPOSITORY": repository_uri(aws)' in source
    assert '"buildspec": "buildspec.yml"' in source
    assert "resolvedSourceVersion" in source
    policy = json.loads((ROOT / "deploy" / "policies" / "build.json").read_text())
    allowed = {a for s in policy["Statement"] for a in ([s["Action"]] if isinstance(s["Action"], str) else s["Action"])}
    assert {"ecr:GetAuthorizationToken", "ecr:BatchGetImage", "ecr:DescribeImages", "ecr:PutImage"} <= allowed
