"""Request structs of retrieval: `rag` on a conversation, and a search by itself."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

QUERY_CHARACTERS = 4096
Query = Annotated[str, Meta(min_length=1, max_length=QUERY_CHARACTERS)]


class SearchRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/collections/{collection}/search"""

    query: Query
    mode: Literal["hybrid", "vector", "bm25"] | None = None
    candidates: Annotated[int, Meta(ge=1, le=200)] | None = None
    top_k: Annotated[int, Meta(ge=1, le=50)] | None = None
    rerank: bool | None = None


class RagRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """`rag` of a chat completion: answer from a collection."""

    collection: Annotated[str, Meta(min_length=1, max_length=128)]
    query: Query | None = None
    """What to search for; the last message of the user when not given."""
    mode: Literal["hybrid", "vector", "bm25"] | None = None
    candidates: Annotated[int, Meta(ge=1, le=200)] | None = None
    top_k: Annotated[int, Meta(ge=1, le=50)] | None = None
    rerank: bool | None = None
    context_tokens: Annotated[int, Meta(ge=64)] | None = None
    """Most tokens of sources; never more than the server allows."""
    citations: Literal["auto", "model", "none"] | None = None
    """model: the numbers the model writes are resolved. auto (the default): sentences that plainly come from a source
    and have no number get one as well. none: nothing is resolved."""
