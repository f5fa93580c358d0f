"""Metrics of collections: ingested documents, searches, and the duration of each step of a search."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.telemetry.exposition import MetricRegistry

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class KnowledgeMetrics:
    """One per gateway process."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._documents = registry.counter(
            "penstock_knowledge_documents_total", "Documents ingested into collections.", ("status",)
        )
        self._chunks = registry.counter("penstock_knowledge_chunks_total", "Chunks embedded and stored.", ())
        self._tokens = registry.counter("penstock_knowledge_tokens_total", "Tokens of stored chunks.", ())
        self._reading = registry.histogram(
            "penstock_knowledge_document_seconds", "Time to ingest a document, until its chunks are stored.",
            (*SECONDS, 30.0, 120.0, 600.0), (),
        )  # fmt: skip
        self._search = registry.histogram(
            "penstock_retrieval_seconds", "Duration of searches and of their steps, which overlap.", SECONDS, ("step",)
        )

    def ingested(self, status: str, chunks: int, tokens: int, seconds: float) -> None:
        self._documents.child(status).inc()
        self._chunks.child().inc(chunks)
        self._tokens.child().inc(tokens)
        self._reading.child().observe(seconds)

    def searched(self, seconds: Mapping[str, float]) -> None:
        for step, taken in seconds.items():
            self._search.child(step).observe(taken)
