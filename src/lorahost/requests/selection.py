"""Which adapter answers a request.

The first of these that names something decides:

1. header `X-Amzn-SageMaker-Adapter-Identifier`
2. `adapter=NAME` in the custom attributes
3. query parameter `adapter`
4. body `adapters`, `adapter_id` or `parameters.adapter_id`, where "" is the base model
5. body `model`: an adapter's name or alias, the base model's name or alias, or "" for the base model
6. the base model

A blank header, attribute or query parameter counts as absent: SageMaker sends no header for the base model,
and proxies turn absent headers into blank ones. A name that is not registered is an error on every level; it
never falls through to the next. Only `model` can be told to be lenient (`unknown_model="base"`), for clients
such as litellm that put the endpoint's name there; strict is the default, because a `model` that is unknown
may as well be an adapter that was removed or mistyped, and its caller must not get another model's answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lorahost.core import Json
from lorahost.errors import AdapterNotFoundError
from lorahost.requests.attributes import Attributes
from lorahost.requests.headers import ADAPTER_ALIAS, ADAPTER_IDENTIFIER, header
from lorahost.requests.problems import invalid, shown

Source = Literal["header", "attributes", "query", "body", "model", "default"]
UnknownModel = Literal["error", "base"]


class Catalog(Protocol):
    """The names that exist now."""

    @property
    def base_name(self) -> str: ...

    def resolve(self, name: str) -> str | None:
        """The registered adapter's name for a name or alias, or None."""

    def is_base(self, name: str) -> bool:
        """Whether `name` is the base model's name or one of its aliases."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Who answers.

    Attributes:
        name: The adapter's registered name, or None for the base model.
        source: What decided.
        alias: How SageMaker calls the adapter (header `-Adapter-Alias`), only when the header decided.
        warnings: One sentence for each name that was given and overruled; for the log and a response header.
    """

    name: str | None
    source: Source
    alias: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Mention:
    source: Source
    label: str
    name: str


def choose(
    headers: Mapping[str, str],
    query: Mapping[str, str],
    body: Json,
    attributes: Attributes,
    catalog: Catalog,
    *,
    unknown_model: UnknownModel = "error",
) -> Choice:
    """Decides which adapter answers, by the order above.

    Raises:
        AdapterNotFoundError: the deciding name is not registered.
        InvalidRequestError: an adapter field of the body has a wrong type, or two of them disagree.
    """
    mentions = list(_explicit(headers, query, body, attributes))
    model = _text(body.get("model"), "model")
    if mentions:
        winner = mentions[0]
        alias = header(headers, ADAPTER_ALIAS) if winner.source == "header" else None
        name = _resolved(winner, alias, catalog)
        return Choice(name, winner.source, alias, tuple(_overruled(winner, name, mentions[1:], model, catalog)))
    if model is None:
        return Choice(None, "default")
    return _by_model(model, catalog, unknown_model)


def _explicit(
    headers: Mapping[str, str], query: Mapping[str, str], body: Json, attributes: Attributes
) -> Iterator[_Mention]:
    if named := header(headers, ADAPTER_IDENTIFIER):
        yield _Mention("header", f"header {ADAPTER_IDENTIFIER}", named)
    if attributes.adapter is not None:
        yield _Mention("attributes", "CustomAttributes adapter", attributes.adapter)
    if asked := (query.get("adapter") or "").strip():
        yield _Mention("query", "query parameter adapter", asked)
    if (found := _of_body(body)) is not None:
        yield _Mention("body", f"body {found[0]}", found[1])


def _of_body(body: Json) -> tuple[str, str] | None:
    parameters = body.get("parameters")
    nested = parameters.get("adapter_id") if isinstance(parameters, dict) else None
    candidates = {
        "adapters": _one_of_list(body),
        "adapter_id": _text(body.get("adapter_id"), "adapter_id"),
        "parameters.adapter_id": _text(nested, "parameters.adapter_id"),
    }
    given = {field: name for field, name in candidates.items() if name is not None}
    if len(set(given.values())) > 1:
        pairs = ", ".join(f"{field}={shown(name)}" for field, name in given.items())
        raise invalid(
            f"the body names different adapters: {pairs}",
            param=next(iter(given)),
            code="conflicting_adapters",
        )
    return next(iter(given.items()), None)


def _one_of_list(body: Json) -> str | None:
    """`adapters`: one name, or one for each prompt, all of which must be the same."""
    value = body.get("adapters")
    if not isinstance(value, list):
        return _text(value, "adapters")
    prompts = _prompt_count(body)
    if len(value) != prompts:
        raise invalid(
            f"adapters has {len(value)} entries for {prompts} prompts; give one name, or one for each prompt",
            param="adapters",
            code="adapters_length_mismatch",
        )
    names = [_required_text(name, f"adapters[{i}]") for i, name in enumerate(value)]
    for i, name in enumerate(names):
        if name != names[0]:
            raise invalid(
                f"adapters[{i}] is {shown(name)} but adapters[0] is {shown(names[0])}; "
                "one request is answered by one adapter: send one request for each",
                param="adapters",
                code="mixed_adapters",
            )
    return names[0]


def _prompt_count(body: Json) -> int:
    prompts = body.get("inputs", body.get("prompt"))
    # A list of messages or of token ids is one prompt.
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list):
        return len(prompts)
    return 1


def _text(value: Any, field: str) -> str | None:
    return None if value is None else _required_text(value, field)


def _required_text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise invalid(f"{field} is {shown(value)}; it must be a string", param=field, code="invalid_type")
    return value.strip()


def _resolved(mention: _Mention, alias: str | None, catalog: Catalog) -> str | None:
    if mention.name == "":
        return None
    name = catalog.resolve(mention.name)
    if name is None and not catalog.is_base(mention.name):
        called = f"{shown(alias)} ({shown(mention.name)})" if alias else shown(mention.name)
        raise AdapterNotFoundError(
            f"adapter {called}, named by {mention.label}, is not registered",
            param=mention.label,
            details={"adapter": mention.name} | ({"alias": alias} if alias else {}),
        )
    return name


def _overruled(
    winner: _Mention, name: str | None, others: list[_Mention], model: str | None, catalog: Catalog
) -> Iterator[str]:
    for other in others:
        meant = catalog.resolve(other.name) if other.name else None
        is_known = meant is not None or other.name == "" or catalog.is_base(other.name)
        if meant != name or not is_known:
            yield _overruling(other.label, other.name, winner)
    # A `model` that is the base's name or unknown says nothing about adapters: it is the usual SageMaker
    # request.
    if model and (meant := catalog.resolve(model)) is not None and meant != name:
        yield _overruling("body model", model, winner)


def _overruling(label: str, name: str, winner: _Mention) -> str:
    return f"{label} names {shown(name)}, overruled by {winner.label}, {shown(winner.name)}"


def _by_model(model: str, catalog: Catalog, unknown_model: UnknownModel) -> Choice:
    name = catalog.resolve(model) if model else None
    if name is not None or model == "" or catalog.is_base(model):
        return Choice(name, "model")
    if unknown_model == "base":
        return Choice(None, "default", warnings=(f"body model {shown(model)} is unknown; answered by the base model",))
    raise AdapterNotFoundError(
        f"model {shown(model)} is neither a registered adapter nor the base model, "
        f"{shown(catalog.base_name)}; leave model out for the base model, or set LORAHOST_UNKNOWN_MODEL=base "
        "if clients put other names there",
        code="model_not_found",
        param="model",
        details={"adapter": model},
    )
