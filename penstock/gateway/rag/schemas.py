"""Request struct of a search by itself; `rag` of a conversation is in `generation/schemas.py`."""

from __future__ import annotations

from msgspec import Struct

from penstock.gateway.generation.schemas import SearchCandidates, SearchMode, SearchQuery, SearchTopK


class SearchRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/collections/{collection}/search"""

    query: SearchQuery
    mode: SearchMode | None = None
    candidates: SearchCandidates | None = None
    top_k: SearchTopK | None = None
    rerank: bool | None = None
