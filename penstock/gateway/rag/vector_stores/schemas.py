"""Requests about vector stores."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.gateway.generation.schemas import Metadata, SearchQuery
from penstock.knowledge.filters import AttributeFilter, Comparison, Compound, Membership
from penstock.protocol.errors import InvalidRequest

MOST_FILES = 500
"""Files that one request may add to a store."""
MOST_FILTERS = 100
MOST_DEPTH = 8
FileId = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=512)]
Key = Annotated[str, Meta(max_length=64)]
Attributes = Annotated[dict[Key, Text | bool | int | float], Meta(max_length=16)]
FileStatus = Literal["in_progress", "completed", "failed", "cancelled"]


class AutoChunking(Struct, forbid_unknown_fields=True, tag_field="type", tag="auto"):
    """Chunks of the store's own size."""


class ChunkSizes(Struct, forbid_unknown_fields=True):
    max_chunk_size_tokens: Annotated[int, Meta(ge=32, le=4096)]
    chunk_overlap_tokens: Annotated[int, Meta(ge=0, le=2048)]


class StaticChunking(Struct, forbid_unknown_fields=True, tag_field="type", tag="static"):
    static: ChunkSizes


Chunking = AutoChunking | StaticChunking


class ExpiresAfter(Struct, forbid_unknown_fields=True):
    anchor: Literal["last_active_at"]
    days: Annotated[int, Meta(ge=1, le=365)]


class VectorStoreRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/vector_stores"""

    name: Annotated[str, Meta(max_length=256)] | None = None
    description: Annotated[str, Meta(max_length=2048)] | None = None
    file_ids: Annotated[list[FileId], Meta(max_length=MOST_FILES)] | None = None
    chunking_strategy: Chunking | None = None
    """The size of chunks of these files, and of later ones that say nothing else."""
    expires_after: ExpiresAfter | None = None
    metadata: Metadata | None = None


class VectorStoreChange(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/vector_stores/{vector_store}"""

    name: Annotated[str, Meta(max_length=256)] | UnsetType | None = UNSET
    expires_after: ExpiresAfter | UnsetType | None = UNSET
    metadata: Metadata | UnsetType | None = UNSET


class Filter(Struct, forbid_unknown_fields=True, kw_only=True):
    """A comparison of an attribute, or several filters joined by `and` or `or`."""

    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin", "and", "or"]
    key: Key | None = None
    value: Text | bool | int | float | Annotated[list[Text | bool | int | float], Meta(max_length=256)] | None = None
    filters: Annotated[list[Filter], Meta(min_length=1, max_length=MOST_FILTERS)] | None = None


class HybridWeights(Struct, forbid_unknown_fields=True):
    embedding_weight: Annotated[float, Meta(ge=0, le=1000)]
    text_weight: Annotated[float, Meta(ge=0, le=1000)]


class RankingOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    ranker: Literal["none", "auto", "default-2024-11-15"] | None = None
    score_threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    hybrid_search: HybridWeights | None = None


class VectorStoreSearchRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/vector_stores/{vector_store}/search"""

    query: SearchQuery | Annotated[list[SearchQuery], Meta(min_length=1, max_length=8)]
    filters: Filter | None = None
    max_num_results: Annotated[int, Meta(ge=1, le=50)] = 10
    ranking_options: RankingOptions | None = None
    rewrite_query: bool | None = None


class StoreFileRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/vector_stores/{vector_store}/files"""

    file_id: FileId
    attributes: Attributes | None = None
    chunking_strategy: Chunking | None = None


class StoreFileChange(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/vector_stores/{vector_store}/files/{file}"""

    attributes: Attributes | None


class FileBatchRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/vector_stores/{vector_store}/file_batches"""

    file_ids: Annotated[list[FileId], Meta(min_length=1, max_length=MOST_FILES)] | None = None
    files: Annotated[list[StoreFileRequest], Meta(min_length=1, max_length=MOST_FILES)] | None = None
    attributes: Attributes | None = None
    chunking_strategy: Chunking | None = None


class StoresQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: Annotated[str, Meta(max_length=128)] | None = None
    before: Annotated[str, Meta(max_length=128)] | None = None


class StoreFilesQuery(StoresQuery, kw_only=True):
    filter: FileStatus | None = None


def chunk_sizes(chunking: Chunking | None, at: str = "chunking_strategy") -> tuple[int, int]:
    """Tokens of a chunk and of the overlap of two; zeros: those of the store."""
    if not isinstance(chunking, StaticChunking):
        return 0, 0
    size, overlap = chunking.static.max_chunk_size_tokens, chunking.static.chunk_overlap_tokens
    if overlap * 2 > size:
        raise InvalidRequest(
            "`chunk_overlap_tokens` is at most half of `max_chunk_size_tokens`.",
            param=f"{at}.static.chunk_overlap_tokens",
        )
    return size, overlap


def attribute_filter(wanted: Filter | None, at: str = "filters") -> AttributeFilter | None:
    """What a filter means; a 400 where it means nothing."""
    return None if wanted is None else _parsed(wanted, at, 1, [MOST_FILTERS])


def _parsed(wanted: Filter, at: str, depth: int, left: list[int]) -> AttributeFilter:
    left[0] -= 1
    if left[0] < 0 or depth > MOST_DEPTH:
        raise InvalidRequest(
            f"A search has at most {MOST_FILTERS} filters, {MOST_DEPTH} inside each other.", param="filters"
        )
    if wanted.type == "and" or wanted.type == "or":
        if wanted.filters is None or wanted.key is not None or wanted.value is not None:
            raise InvalidRequest(f"`{wanted.type}` has `filters`, and no `key` and `value`.", param=at)
        parts = [_parsed(one, f"{at}.filters[{index}]", depth + 1, left) for index, one in enumerate(wanted.filters)]
        return Compound(wanted.type, tuple(parts))
    if wanted.key is None or wanted.value is None or wanted.filters is not None:
        raise InvalidRequest(f"`{wanted.type}` has a `key` and a `value`, and no `filters`.", param=at)
    if isinstance(wanted.value, list):
        if wanted.type == "in" or wanted.type == "nin":
            return Membership.of(wanted.type, wanted.key, wanted.value)
        raise InvalidRequest(f"The `value` of `{wanted.type}` is not a list.", param=f"{at}.value")
    if wanted.type == "in" or wanted.type == "nin":
        raise InvalidRequest(f"The `value` of `{wanted.type}` is a list.", param=f"{at}.value")
    return Comparison(wanted.type, wanted.key, wanted.value)
