"""Request bodies of text-generation-inference."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from penstock.gateway.generation.schemas import INT64

ModelName = Annotated[str, Meta(max_length=256)]


class JsonGrammar(Struct, forbid_unknown_fields=True, tag_field="type", tag="json"):
    """JSON that is valid under a schema, which may come as text."""

    value: dict[str, Any] | str


class JsonObjectGrammar(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """Another name of it."""

    value: dict[str, Any] | str


class RegexGrammar(Struct, forbid_unknown_fields=True, tag_field="type", tag="regex"):
    """Text that matches a regular expression."""

    value: Annotated[str, Meta(min_length=1)]


class NamedSchema(Struct, forbid_unknown_fields=True, kw_only=True):
    schema: dict[str, Any]
    name: str | None = None
    strict: bool | None = None


class JsonSchemaGrammar(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """A schema with a name."""

    value: NamedSchema


TgiGrammar = JsonGrammar | JsonObjectGrammar | RegexGrammar | JsonSchemaGrammar
StopSequence = Annotated[str, Meta(max_length=1024)]


class TgiParameters(Struct, forbid_unknown_fields=True, kw_only=True):
    """`parameters` of a request."""

    adapter_id: ModelName | None = None
    """The name of an adapter."""
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    temperature: Annotated[float, Meta(gt=0, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    do_sample: bool | None = None
    """False, as not given where there are parameters: greedy, unless one of the filters above is there."""
    max_new_tokens: Annotated[int, Meta(ge=1, le=INT64)] | None = None
    return_full_text: bool | None = None
    """The prompt before the text."""
    stop: Annotated[list[StopSequence], Meta(max_length=16)] | None = None
    """A sequence that ends the text is part of it."""
    truncate: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None
    top_n_tokens: Annotated[int, Meta(ge=0, le=20)] | None = None
    grammar: TgiGrammar | None = None


class TgiRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST / and /generate_stream"""

    model: ModelName | None = None
    """The first model when not given."""
    inputs: str
    parameters: TgiParameters | None = None
    stream: bool | None = None


class TgiModelQuery(Struct, forbid_unknown_fields=True):
    """Of /info."""

    model: str | None = None
    """The first model when not given."""
