"""The list of models as Anthropic's clients read it: names and dates by other names, and pages."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from penstock.gateway.app.decoding import decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.protocol.errors import InvalidRequest

Described = Mapping[str, Any]
"""A model as `/v1/models` shows it to everybody."""


class ModelsQuery(msgspec.Struct, frozen=True):
    """Read where the request has the header `anthropic-version`."""

    after_id: str | None = None
    before_id: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 20


def model_info(model: Described) -> dict[str, Any]:
    """A model with the fields that Anthropic's clients know, besides its own."""
    created = datetime.datetime.fromtimestamp(model["created"], datetime.UTC)
    return {
        "type": "model",
        **model,
        "display_name": model["id"],
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": model.get("context_window"),
        "max_tokens": model.get("max_output_tokens"),
    }


def page(exchange: Exchange, models: Sequence[Described]) -> dict[str, Any]:
    """The page that the query asks for."""
    asked = decode_query(ModelsQuery, exchange.scope)
    if asked.after_id is not None and asked.before_id is not None:
        raise InvalidRequest("Send `after_id` or `before_id`, not both.", param="before_id")
    ids = [model["id"] for model in models]
    for name in ("after_id", "before_id"):
        if (id := getattr(asked, name)) is not None and id not in ids:
            raise InvalidRequest(f"`{name}` is not the id of a model that is listed.", param=name)
    if asked.before_id is not None:
        before = models[: ids.index(asked.before_id)]
        found, more = before[-asked.limit :], len(before) > asked.limit
    else:
        after = models[ids.index(asked.after_id) + 1 :] if asked.after_id is not None else models
        found, more = after[: asked.limit], len(after) > asked.limit
    return {
        "data": [model_info(model) for model in found],
        "has_more": more,
        "first_id": found[0]["id"] if found else None,
        "last_id": found[-1]["id"] if found else None,
    }
