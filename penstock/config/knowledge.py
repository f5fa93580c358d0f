"""Settings of collections and retrieval."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.fields import setting


@dataclass(frozen=True, slots=True)
class KnowledgeConfig:
    """Collections of documents, and answers from them."""

    url: str = setting(
        "", doc="sqlite:///FOLDER (a file per collection) or postgresql://USER:PASSWORD@HOST/NAME with pgvector; where "
        "the store is when empty; off: no collections.",
    )  # fmt: skip
    encoder: str = setting("", doc="The encoder that embeds documents and questions; the first one when empty.")
    reranker: str = setting("", doc="An encoder that is a cross-encoder, to rerank with; late interaction when empty.")
    chunk_tokens: int = setting(200, doc="Most tokens of a chunk, where a collection says nothing.", least=32)
    overlap_tokens: int = setting(32, doc="Tokens that chunks cut from one section share.", least=0)
    candidates: int = setting(20, doc="Chunks that a search hands to the reranker.", least=1, most=200)
    passages: int = setting(4, doc="Chunks that the reranker leaves.", least=1, most=50)
    context_tokens: int = setting(3000, doc="Most tokens of sources in a prompt.", least=64)
    document_limit: int = setting(
        32 * 2**20, doc="Largest document; a larger one gets 413.", least=1024, size=True, example="32MiB"
    )
    readers: int = setting(2, doc="Documents that a gateway reads at one time.", least=1, most=64)
    collections_per_tenant: int = setting(1000, doc="Most collections of a tenant.", least=1)
    documents_per_collection: int = setting(100_000, doc="Most documents of a collection.", least=1)
    waiting_documents: int = setting(20_000, doc="Most documents of a tenant that wait to be read.", least=1)
