"""Settings of collections and retrieval."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.fields import setting


@dataclass(frozen=True, slots=True)
class KnowledgeConfig:
    """Collections of documents and retrieval (RAG)."""

    url: str = setting(
        "", doc="sqlite:///FOLDER (a file per collection) or postgresql://USER:PASSWORD@HOST/NAME with pgvector; "
        "empty: beside the store; off: no collections.",
    )  # fmt: skip
    encoder: str = setting("", doc="Encoder for documents and questions; empty: the first encoder.")
    reranker: str = setting("", doc="A cross-encoder to rerank with; empty: late interaction.")
    chunk_tokens: int = setting(200, doc="Maximum tokens per chunk, unless the collection sets its own.", least=32)
    overlap_tokens: int = setting(32, doc="Tokens shared by consecutive chunks of one section.", least=0)
    candidates: int = setting(20, doc="Chunks passed to the reranker.", least=1, most=200)
    passages: int = setting(4, doc="Chunks kept by the reranker.", least=1, most=50)
    context_tokens: int = setting(3000, doc="Maximum tokens of sources in a prompt.", least=64)
    document_limit: int = setting(
        32 * 2**20, doc="Maximum size of a document; larger ones get 413.", least=1024, size=True, example="32MiB"
    )
    readers: int = setting(2, doc="Documents that a gateway ingests in parallel.", least=1, most=64)
    collections_per_tenant: int = setting(1000, doc="Maximum of collections per tenant.", least=1)
    documents_per_collection: int = setting(100_000, doc="Maximum of documents per collection.", least=1)
    waiting_documents: int = setting(20_000, doc="Maximum of documents per tenant waiting to be ingested.", least=1)
