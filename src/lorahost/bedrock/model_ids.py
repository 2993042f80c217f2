"""Which model a Bedrock `modelId` means: the base model or an adapter, under any of the names that clients use.

Tried in this order, the first that names something decides:

1. the id as it is: an adapter's name or alias, or the base model's name
2. `<base>:<adapter>`
3. of an ARN, the resource's id behind its type (`...:imported-model/ID`), read like 1 and 2
4. of an ARN, the last piece of that id

An id that names nothing is an error; it is never answered by another model.
"""

from __future__ import annotations

from collections.abc import Iterator

from lorahost.core import Json
from lorahost.errors import AdapterNotFoundError
from lorahost.requests import selection
from lorahost.requests.attributes import Attributes
from lorahost.requests.problems import invalid, shown
from lorahost.requests.selection import Catalog, Choice

MAX_CHARS = 2048
ARN_COLONS = 5
NAMING_FIELDS = ("model", "adapters", "adapter_id", "parameters")


def choose(model_id: str, body: Json, catalog: Catalog) -> Choice:
    """Who answers; a model that the body names too must be the same one.

    Args:
        model_id: Decoded, from the path.
        body: The request's OpenAI fields as sent; only `NAMING_FIELDS` are read.
        catalog: The names that exist now.

    Raises:
        InvalidRequestError: the id is empty or longer than 2,048 characters, or the body names another model.
        AdapterNotFoundError: the id, or the body's model, is not registered.
        AdapterConflictError: an alias belongs to several adapters.
    """
    if not model_id.strip():
        raise invalid("modelId is empty; it must be the base model's name or an adapter's", param="modelId")
    if len(model_id) > MAX_CHARS:
        raise invalid(f"modelId has {len(model_id)} characters; the limit is {MAX_CHARS}", param="modelId")
    name = _resolved(model_id, catalog)
    named = {field: body[field] for field in NAMING_FIELDS if body.get(field) is not None}
    if named:
        other = selection.choose({}, {}, named, Attributes(), catalog)
        if other.source != "default" and other.name != name:
            raise invalid(
                f"the body names {shown(other.name or catalog.base_name)}, but modelId is {shown(model_id)}",
                param="modelId",
                code="conflicting_models",
            )
    return Choice(name, "model")


def _resolved(model_id: str, catalog: Catalog) -> str | None:
    """The adapter's registered name, or None for the base model."""
    for candidate in _candidates(model_id):
        if (name := catalog.resolve(candidate)) is not None:
            return name
        if catalog.is_base(candidate):
            return None
        adapter = candidate.removeprefix(f"{catalog.base_name}:")
        if adapter != candidate and (name := catalog.resolve(adapter)) is not None:
            return name
    raise AdapterNotFoundError(
        f"modelId {shown(model_id)} is neither the base model, {shown(catalog.base_name)}, nor a registered adapter; "
        "an id is a name or alias, <base>:<adapter>, or an ARN that ends in one of them",
        code="model_not_found",
        param="modelId",
    )


def _candidates(model_id: str) -> Iterator[str]:
    yield model_id
    pieces = model_id.split(":", ARN_COLONS)
    if pieces[0] == "arn" and len(pieces) > ARN_COLONS:
        of_type = pieces[ARN_COLONS].partition("/")[2]
        if of_type:
            yield of_type
            yield of_type.rpartition("/")[2]
