"""The table of endpoints of Ollama's API."""

from __future__ import annotations

from penstock.gateway.api.ollama.endpoints import OllamaEndpoints
from penstock.gateway.api.ollama.pull import OllamaPullEndpoints
from penstock.gateway.api.ollama.schemas import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaNamedRequest,
    OllamaPullRequest,
)
from penstock.gateway.app.dialects import OLLAMA as DIALECT
from penstock.gateway.app.endpoint import Endpoint

TAG = "Ollama"
OLLAMA = (
    *(
        Endpoint("POST", path, handler, summary, TAG, body, serves_tokens=True, untyped=True, dialect=DIALECT)
        for path, handler, summary, body in (
            ("/api/chat", OllamaEndpoints.ollama_chat, "Answer a conversation.", OllamaChatRequest),
            ("/api/generate", OllamaEndpoints.ollama_generate, "Answer or continue a prompt.", OllamaGenerateRequest),
            ("/api/embed", OllamaEndpoints.ollama_embed, "Embed texts.", OllamaEmbedRequest),
            ("/api/embeddings", OllamaEndpoints.ollama_embeddings, "Embed a text.", OllamaEmbeddingsRequest),
        )
    ),
    Endpoint("GET", "/api/tags", OllamaEndpoints.ollama_tags, "The models served here.", TAG, dialect=DIALECT),
    Endpoint("GET", "/api/ps", OllamaEndpoints.ollama_ps, "The models in memory.", TAG, dialect=DIALECT),
    Endpoint(
        "POST",
        "/api/show",
        OllamaEndpoints.ollama_show,
        "One model.",
        TAG,
        OllamaNamedRequest,
        untyped=True,
        dialect=DIALECT,
    ),
    Endpoint(
        "GET",
        "/api/version",
        OllamaEndpoints.ollama_version,
        "The version of Ollama whose API this is.",
        TAG,
        scope=None,
        logged=False,
        dialect=DIALECT,
    ),
    Endpoint(
        "POST",
        "/api/pull",
        OllamaPullEndpoints.ollama_pull,
        "Load a model.",
        TAG,
        OllamaPullRequest,
        scope="admin",
        dialect=DIALECT,
    ),
    *(
        Endpoint(method, f"/api/{what}", handler, "Refused with a reason.", TAG, scope="admin", dialect=DIALECT)
        for method, what, handler in (
            ("DELETE", "delete", OllamaPullEndpoints.ollama_delete),
            ("POST", "create", OllamaPullEndpoints.ollama_create),
            ("POST", "copy", OllamaPullEndpoints.ollama_copy),
            ("POST", "push", OllamaPullEndpoints.ollama_push),
            ("POST", "blobs/{digest}", OllamaPullEndpoints.ollama_blob),
        )
    ),
)
