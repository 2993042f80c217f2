"""`lorahost deploy image`: the image repository, the project that builds it, one build and its log."""

from __future__ import annotations

import json
from typing import Any

import click

from lorahost_deploy import console
from lorahost_deploy.aws import Aws
from lorahost_deploy.compare import holds
from lorahost_deploy.errors import DeployError
from lorahost_deploy.options import verb
from lorahost_deploy.plan import S3Place
from lorahost_deploy.policies import BUILD_ROLE, PROJECT, REPOSITORY, role_arn

KEPT_IMAGES = 20
LIFECYCLE = {
    "rules": [
        {
            "rulePriority": 1,
            "description": "untagged layers of failed pushes",
            "selection": {
                "tagStatus": "untagged",
                "countType": "sinceImagePushed",
                "countUnit": "days",
                "countNumber": 7,
            },
            "action": {"type": "expire"},
        },
        {
            "rulePriority": 2,
            "description": f"the newest {KEPT_IMAGES} images",
            "selection": {"tagStatus": "any", "countType": "imageCountMoreThan", "countNumber": KEPT_IMAGES},
            "action": {"type": "expire"},
        },
    ]
}


@click.command("image")
@click.option("--source", required=True, help="Git address, or s3://bucket/key.zip, with the repository.")
@click.option("--revision", default="", help="Commit, branch or tag to build; by default the source's own.")
@click.option("--compute", default="BUILD_GENERAL1_2XLARGE", show_default=True, help="CodeBuild's machine.")
@click.option("--store", help="Where each build's image.json goes: below images/ of s3://bucket/prefix.")
@click.option("--no-build", is_flag=True, help="Only the repository and the project.")
@verb
def image(aws: Aws, source: str, revision: str, compute: str, store: str | None, no_build: bool) -> None:
    """Build the container image with CodeBuild and push it to ECR."""
    ensure_repository(aws)
    ensure_project(aws, project(aws, source, compute, store))
    if not no_build:
        build(aws, revision)


def repository_uri(aws: Aws) -> str:
    """Address of the image repository."""
    suffix = "amazonaws.com.cn" if aws.partition == "aws-cn" else "amazonaws.com"
    return f"{aws.account}.dkr.ecr.{aws.region}.{suffix}/{REPOSITORY}"


def ensure_repository(aws: Aws) -> None:
    """Creates the repository, with tags that never move and a limit on old images."""
    found = aws.find("ecr", "DescribeRepositories", repositoryNames=[REPOSITORY])
    if found is None:
        scan = {"imageScanningConfiguration": {"scanOnPush": True}}
        aws.change("ecr", "CreateRepository", {"repositoryName": REPOSITORY, "imageTagMutability": "IMMUTABLE", **scan})
        console.say(f"repository {REPOSITORY}: created")
    elif found["repositories"][0]["imageTagMutability"] != "IMMUTABLE":
        aws.change("ecr", "PutImageTagMutability", {"repositoryName": REPOSITORY, "imageTagMutability": "IMMUTABLE"})
    policy = aws.find("ecr", "GetLifecyclePolicy", repositoryName=REPOSITORY)
    if policy is None or json.loads(policy["lifecyclePolicyText"]) != LIFECYCLE:
        text = json.dumps(LIFECYCLE)
        aws.change("ecr", "PutLifecyclePolicy", {"repositoryName": REPOSITORY, "lifecyclePolicyText": text})
        console.say(f"repository {REPOSITORY}: lifecycle policy put")


def project(aws: Aws, source: str, compute: str, store: str | None) -> dict[str, Any]:
    """The build project as it shall be."""
    variables = {"AWS_ACCOUNT_ID": aws.account, "IMAGE_REPOSITORY": repository_uri(aws)}
    return {
        "name": PROJECT,
        "description": "lorahost's container image",
        "source": {**_source(source), "buildspec": "buildspec.yml"},
        "artifacts": _artifacts(store),
        "environment": {
            "type": "LINUX_CONTAINER",
            "image": "aws/codebuild/standard:7.0",
            "computeType": compute,
            "privilegedMode": True,
            "environmentVariables": [{"name": n, "value": v, "type": "PLAINTEXT"} for n, v in variables.items()],
        },
        "serviceRole": role_arn(aws, BUILD_ROLE),
        "timeoutInMinutes": 180,
        "queuedTimeoutInMinutes": 60,
        "logsConfig": {"cloudWatchLogs": {"status": "ENABLED", "groupName": f"/aws/codebuild/{PROJECT}"}},
    }


def _artifacts(store: str | None) -> dict[str, Any]:
    if store is None:
        return {"type": "NO_ARTIFACTS"}
    place = S3Place.parse(store)
    folder = f"{place.prefix}/images" if place.prefix else "images"
    where = {"location": place.bucket, "path": folder, "name": "/"}
    return {"type": "S3", **where, "namespaceType": "BUILD_ID", "packaging": "NONE"}


def _source(address: str) -> dict[str, Any]:
    if address.startswith("s3://"):
        return {"type": "S3", "location": address.removeprefix("s3://")}
    hosts = {
        "github.com": "GITHUB",
        "gitlab.com": "GITLAB",
        "bitbucket.org": "BITBUCKET",
        "git-codecommit": "CODECOMMIT",
    }
    for host, kind in hosts.items():
        if host in address:
            return {"type": kind, "location": address, "gitCloneDepth": 1}
    raise DeployError(f"--source {address!r}: CodeBuild builds from {', '.join(hosts)} and s3://bucket/key.zip")


def ensure_project(aws: Aws, wanted: dict[str, Any]) -> None:
    """Creates the project, or updates it when a field differs."""
    found = aws.find("codebuild", "BatchGetProjects", names=[PROJECT])
    projects = found["projects"] if found else []
    if not projects:
        aws.change("codebuild", "CreateProject", wanted)
        console.say(f"project {PROJECT}: created")
    elif any(not holds(projects[0].get(name), value) for name, value in wanted.items()):
        aws.change("codebuild", "UpdateProject", wanted)
        console.say(f"project {PROJECT}: updated")


def build(aws: Aws, revision: str) -> None:
    """Starts a build and follows its log to the end.

    Raises:
        DeployError: it did not succeed; with the phase and its message.
    """
    version = {"sourceVersion": revision} if revision else {}
    started = aws.change("codebuild", "StartBuild", {"projectName": PROJECT, **version})
    if aws.dry_run:
        return
    build_id = started["build"]["id"]
    console.say(f"build {build_id} started")
    token: str | None = None
    while True:
        [now] = aws.read("codebuild", "BatchGetBuilds", ids=[build_id])["builds"]
        token = _show_log(aws, now.get("logs", {}), token)
        if now["buildStatus"] != "IN_PROGRESS":
            break
        aws.sleep()
    if now["buildStatus"] != "SUCCEEDED":
        said = [
            f"{phase['phaseType']}: {context['message']}"
            for phase in now.get("phases", [])
            for context in phase.get("contexts", [])
            if phase.get("phaseStatus") not in (None, "SUCCEEDED") and context.get("message")
        ]
        group = now.get("logs", {}).get("groupName", f"/aws/codebuild/{PROJECT}")
        raise DeployError(f"build {build_id} is {now['buildStatus']}\n" + "\n".join([*said, f"log group: {group}"]))
    console.say(f"build {build_id}: SUCCEEDED")
    click.echo(f"{repository_uri(aws)}:{now.get('resolvedSourceVersion') or now.get('sourceVersion', '')}")


def _show_log(aws: Aws, logs: dict[str, Any], token: str | None) -> str | None:
    """Prints the log's new lines; returns where to go on. A build has no log before it leaves the queue."""
    if not logs.get("groupName") or not logs.get("streamName"):
        return token
    where = {"logGroupName": logs["groupName"], "logStreamName": logs["streamName"], "startFromHead": True}
    while True:
        page = aws.find("logs", "GetLogEvents", **where, **({"nextToken": token} if token else {}))
        if page is None:
            return token
        for event in page["events"]:
            console.say(event["message"].rstrip())
        if page["nextForwardToken"] == token:
            return token
        token = page["nextForwardToken"]


def remove(aws: Aws) -> None:
    """Deletes the project and the repository with all its images."""
    found = aws.find("codebuild", "BatchGetProjects", names=[PROJECT])
    if found and found["projects"]:
        aws.remove("codebuild", "DeleteProject", name=PROJECT)
        console.say(f"project {PROJECT}: deleted")
    if aws.find("ecr", "DescribeRepositories", repositoryNames=[REPOSITORY]):
        aws.remove("ecr", "DeleteRepository", repositoryName=REPOSITORY, force=True)
        console.say(f"repository {REPOSITORY}: deleted")
