"""`lorahost deploy teardown`: everything of an endpoint, in reverse order."""

from __future__ import annotations

import click

from lorahost_deploy import components, console, image, role, scaling, store, waiting
from lorahost_deploy import endpoint as endpoint_verb
from lorahost_deploy import status as status_verb
from lorahost_deploy.aws import Aws
from lorahost_deploy.options import endpoint_option, verb
from lorahost_deploy.plan import base_of


@click.command("teardown")
@endpoint_option
@click.option("--store", "store_url", help="Delete the models and adapters below s3://bucket/prefix, too.")
@click.option("--shared", is_flag=True, help="Delete roles, build project and images, too; other endpoints use them.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@verb
def teardown(aws: Aws, endpoint: str, store_url: str | None, shared: bool, yes: bool) -> None:
    """Remove autoscaling, adapters, base model, endpoint, configurations and models."""
    rows = status_verb.collect(aws, endpoint)
    console.say(console.table(("kind", "name"), [(row["kind"], row["name"]) for row in rows]))
    extra = [
        text for text, there in ((f"all of {store_url}", store_url), ("roles, project and images", shared)) if there
    ]
    if not (yes or aws.dry_run):
        click.confirm(f"delete {' and '.join(['these', *extra])}?", abort=True, err=True)
    remove(aws, endpoint)
    if store_url:
        store.clear(aws, store_url)
    if shared:
        image.remove(aws)
        role.remove(aws)
    console.say(f"{endpoint}: nothing is left")


def remove(aws: Aws, endpoint: str) -> None:
    """Deletes in the order that SageMaker takes; what is gone already is fine."""
    scaling.remove(aws, base_of(endpoint))
    found = list(components.of_endpoint(aws, endpoint))
    for adapters in (True, False):
        names = [c["InferenceComponentName"] for c in found if bool(components.base_name(c)) == adapters]
        for name in names:
            components.start_delete(aws, name)
        for name in names:
            components.finish_delete(aws, name, f"component {name}")
    what = f"endpoint {endpoint}"
    last = waiting.settled(aws, lambda: endpoint_verb.look(aws, endpoint), endpoint_verb.STATUS, what, 7200.0)
    if last is not None:
        aws.remove("sagemaker", "DeleteEndpoint", EndpointName=endpoint)
        waiting.gone(aws, lambda: endpoint_verb.look(aws, endpoint), endpoint_verb.STATUS, what)
    for kind in ("EndpointConfig", "Model"):
        for name in endpoint_verb.generated(aws, kind, endpoint):
            aws.remove("sagemaker", f"Delete{kind}", **{f"{kind}Name": name})
            console.say(f"{kind} {name}: deleted")
