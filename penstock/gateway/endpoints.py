"""The table of endpoints; `openapi.py` documents it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from penstock.gateway.anthropic.schemas import CountTokensRequest, MessagesRequest
from penstock.gateway.api.admin import (
    AdapterLoadRequest,
    AdapterPinRequest,
    list_adapters,
    load_adapter,
    pin_adapter,
    unload_adapter,
)
from penstock.gateway.api.batches import BatchesQuery, BatchRequest, cancel_batch, create_batch, get_batch, list_batches
from penstock.gateway.api.cache import (
    AdminCacheQuery,
    CacheQuery,
    evict_all_caches,
    evict_cache,
    show_all_caches,
    show_cache,
)
from penstock.gateway.api.chat import chat_completions
from penstock.gateway.api.collections import (
    CollectionRequest,
    PageQuery,
    create_collection,
    delete_collection,
    get_collection,
    list_collections,
    search_collection,
)
from penstock.gateway.api.completions import completions
from penstock.gateway.api.conversations import (
    ConversationQuery,
    ConversationsQuery,
    delete_conversation,
    get_conversation,
    list_conversations,
)
from penstock.gateway.api.documents import (
    DOCUMENT_FORM,
    DocumentRequest,
    DocumentsQuery,
    FileQuery,
    add_document,
    delete_document,
    get_chunk,
    get_document,
    list_chunks,
    list_documents,
    put_document,
)
from penstock.gateway.api.embeddings import embeddings
from penstock.gateway.api.feedback import FeedbackQuery, FeedbackRequest, give_feedback, list_feedback
from penstock.gateway.api.files import (
    FILE_FORM,
    FilesQuery,
    create_file,
    delete_file,
    file_content,
    get_file,
    list_files,
)
from penstock.gateway.api.health import live, ready
from penstock.gateway.api.identity import (
    KeyChange,
    KeyRequest,
    TenantChange,
    TenantRequest,
    change_key,
    change_tenant,
    create_key,
    create_tenant,
    get_tenant,
    list_keys,
    list_tenants,
    revoke_key,
)
from penstock.gateway.api.loading import ModelLoadRequest, admin_models, load_model, unload_model
from penstock.gateway.api.messages import count_tokens, create_message
from penstock.gateway.api.metrics import metrics
from penstock.gateway.api.models import get_model, list_models
from penstock.gateway.api.replicas import (
    DrainRequest,
    RestartRequest,
    ScaleRequest,
    drain_replica,
    drain_server,
    list_replicas,
    restart_model,
    scale_model,
)
from penstock.gateway.api.requests import RequestsQuery, list_requests
from penstock.gateway.api.rerank import rerank
from penstock.gateway.api.responses import create_response, delete_response, get_response
from penstock.gateway.api.routes import RouteSwitch, list_routes, switch_route
from penstock.gateway.api.sleeping import sleep_model, wake_model
from penstock.gateway.api.tokenize import detokenize, tokenize
from penstock.gateway.api.tools import list_tool_servers, list_tools, register_tool_server, remove_tool_server
from penstock.gateway.api.traces import TracesQuery, get_trace, list_traces
from penstock.gateway.api.usage import UsageQuery, usage
from penstock.gateway.dialects import ANTHROPIC, OPENAI, Dialect
from penstock.gateway.exchange import Exchange
from penstock.gateway.rag import SearchRequest
from penstock.gateway.responses.schemas import ResponsesRequest
from penstock.gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    RerankRequest,
    TokenizeRequest,
)
from penstock.gateway.service import Service
from penstock.identity import Scope
from penstock.tools.running.specs import ToolSpec

Handler = Callable[[Service, Exchange], Awaitable[None]]
Door = Literal["all", "public", "admin"]
"""What a port answers: everything, or, where administration has a port of its own, one part each. Health, metrics and
the documentation are behind every door."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    method: str
    path: str
    handler: Handler
    summary: str
    tag: str
    body: type[msgspec.Struct] | None = None
    form: dict[str, Any] | None = None
    """The fields of one that is sent a form with a file, as a JSON schema."""
    query: type[msgspec.Struct] | None = None
    """What may stand behind the question mark."""
    hot: bool = False
    """Answered without entering FastAPI."""
    serves_tokens: bool = False
    """Refused while draining, and waited for."""
    scope: Scope | None = "inference"
    """What a key must be allowed to do; None: no key is needed."""
    logged: bool = True
    documented: bool = True
    dialect: Dialect = OPENAI

    def behind(self, door: Door) -> bool:
        if door == "all" or self.scope in (None, "metrics"):
            return True
        return (self.scope == "admin") == (door == "admin")


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        "Answer a conversation, streamed or whole.",
        "Inference",
        ChatRequest,
        hot=True,
        serves_tokens=True,
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        completions,
        "Continue text or token ids.",
        "Inference",
        CompletionRequest,
        hot=True,
        serves_tokens=True,
    ),
    Endpoint(
        "POST",
        "/v1/responses",
        create_response,
        "Answer a conversation, which may be stored and continued.",
        "Inference",
        ResponsesRequest,
        hot=True,
        serves_tokens=True,
    ),
    Endpoint("GET", "/v1/responses/{response}", get_response, "A stored response.", "Inference"),
    Endpoint("DELETE", "/v1/responses/{response}", delete_response, "Forget a stored response.", "Inference"),
    Endpoint("GET", "/v1/tools", list_tools, "Tools that the server runs for you.", "Inference"),
    Endpoint("GET", "/v1/admin/tools", list_tool_servers, "Every tool server.", "Admin", scope="admin"),
    Endpoint(
        "POST", "/v1/admin/tools", register_tool_server, "Register a tool server.", "Admin", ToolSpec, scope="admin"
    ),
    Endpoint("DELETE", "/v1/admin/tools/{name}", remove_tool_server, "Remove one.", "Admin", scope="admin"),
    Endpoint(
        "GET",
        "/v1/conversations",
        list_conversations,
        "A user's conversations.",
        "Conversations",
        query=ConversationsQuery,
    ),
    Endpoint(
        "GET",
        "/v1/conversations/{conversation}",
        get_conversation,
        "What was said.",
        "Conversations",
        query=ConversationQuery,
    ),
    Endpoint(
        "DELETE",
        "/v1/conversations/{conversation}",
        delete_conversation,
        "Forget it.",
        "Conversations",
        query=ConversationQuery,
    ),
    Endpoint(
        "POST",
        "/v1/messages",
        create_message,
        "Answer a conversation, for clients of the Messages API.",
        "Inference",
        MessagesRequest,
        hot=True,
        serves_tokens=True,
        dialect=ANTHROPIC,
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        "How many tokens a conversation has.",
        "Tokens",
        CountTokensRequest,
        serves_tokens=True,
        dialect=ANTHROPIC,
    ),
    Endpoint(
        "POST",
        "/v1/embeddings",
        embeddings,
        "Vectors of texts.",
        "Inference",
        EmbeddingsRequest,
        hot=True,
        serves_tokens=True,
    ),
    Endpoint(
        "POST",
        "/v1/rerank",
        rerank,
        "Documents in order of how well they answer a query.",
        "Inference",
        RerankRequest,
        hot=True,
        serves_tokens=True,
    ),
    Endpoint("POST", "/v1/files", create_file, "Send a file of requests.", "Batches", form=FILE_FORM),
    Endpoint("GET", "/v1/files", list_files, "The files there are.", "Batches", query=FilesQuery),
    Endpoint("GET", "/v1/files/{file}", get_file, "A file without its content.", "Batches"),
    Endpoint("DELETE", "/v1/files/{file}", delete_file, "Delete a file.", "Batches"),
    Endpoint("GET", "/v1/files/{file}/content", file_content, "What is in a file.", "Batches"),
    Endpoint("POST", "/v1/batches", create_batch, "Run the requests in a file.", "Batches", BatchRequest),
    Endpoint("GET", "/v1/batches", list_batches, "The batches there are.", "Batches", query=BatchesQuery),
    Endpoint("GET", "/v1/batches/{batch}", get_batch, "A batch and how far it is.", "Batches"),
    Endpoint("POST", "/v1/batches/{batch}/cancel", cancel_batch, "Stop a batch.", "Batches"),
    Endpoint("GET", "/v1/cache", show_cache, "Your tenant's cached answers.", "Inference"),
    Endpoint("DELETE", "/v1/cache", evict_cache, "Forget them.", "Inference", query=CacheQuery),
    Endpoint(
        "GET", "/v1/admin/cache", show_all_caches, "Cached answers.", "Admin", scope="admin", query=AdminCacheQuery
    ),
    Endpoint(
        "DELETE", "/v1/admin/cache", evict_all_caches, "Forget them.", "Admin", scope="admin", query=AdminCacheQuery
    ),
    Endpoint("GET", "/v1/models", list_models, "The models served here.", "Models"),
    Endpoint("GET", "/v1/models/{model:path}", get_model, "One model.", "Models"),
    Endpoint(
        "POST",
        "/v1/tokenize",
        tokenize,
        "Tokens, their number and price, without inference.",
        "Tokens",
        TokenizeRequest,
        serves_tokens=True,
    ),
    Endpoint(
        "POST", "/v1/detokenize", detokenize, "Text of token ids.", "Tokens", DetokenizeRequest, serves_tokens=True
    ),
    Endpoint("GET", "/v1/admin/adapters", list_adapters, "Every LoRA adapter and its state.", "Admin", scope="admin"),
    Endpoint(
        "POST",
        "/v1/admin/adapters",
        load_adapter,
        "Load an adapter, or load it again.",
        "Admin",
        AdapterLoadRequest,
        scope="admin",
    ),
    Endpoint(
        "PATCH",
        "/v1/admin/adapters/{name:path}",
        pin_adapter,
        "Pin or unpin an adapter.",
        "Admin",
        AdapterPinRequest,
        scope="admin",
    ),
    Endpoint("DELETE", "/v1/admin/adapters/{name:path}", unload_adapter, "Unload an adapter.", "Admin", scope="admin"),
    Endpoint("GET", "/v1/admin/models", admin_models, "Models, and those being loaded.", "Admin", scope="admin"),
    Endpoint("POST", "/v1/admin/models", load_model, "Serve one more model.", "Admin", ModelLoadRequest, scope="admin"),
    Endpoint("DELETE", "/v1/admin/models/{model:path}", unload_model, "Serve it no more.", "Admin", scope="admin"),
    Endpoint(
        "POST", "/v1/admin/models/{model:path}/sleep", sleep_model, "Free a model's memory.", "Admin", scope="admin"
    ),
    Endpoint("POST", "/v1/admin/models/{model:path}/wake", wake_model, "Load it again.", "Admin", scope="admin"),
    Endpoint("GET", "/v1/admin/routes", list_routes, "What each route does.", "Admin", scope="admin"),
    Endpoint(
        "PATCH",
        "/v1/admin/routes/{route}",
        switch_route,
        "Turn a route off or on, or change its share.",
        "Admin",
        RouteSwitch,
        scope="admin",
    ),
    Endpoint("GET", "/v1/admin/replicas", list_replicas, "The engines behind every model.", "Admin", scope="admin"),
    Endpoint(
        "POST",
        "/v1/admin/models/{model:path}/scale",
        scale_model,
        "Run more or fewer replicas of a model.",
        "Admin",
        ScaleRequest,
        scope="admin",
    ),
    Endpoint(
        "POST",
        "/v1/admin/models/{model:path}/restart",
        restart_model,
        "Drain and start again, one replica after the other.",
        "Admin",
        RestartRequest,
        scope="admin",
    ),
    Endpoint(
        "POST",
        "/v1/admin/models/{model:path}/drain",
        drain_replica,
        "Let a replica finish what it runs and stop.",
        "Admin",
        DrainRequest,
        scope="admin",
    ),
    Endpoint("POST", "/v1/admin/drain", drain_server, "Finish what runs and stop.", "Admin", scope="admin"),
    Endpoint("POST", "/v1/collections", create_collection, "Make a collection.", "Knowledge", CollectionRequest),
    Endpoint("GET", "/v1/collections", list_collections, "The collections there are.", "Knowledge", query=PageQuery),
    Endpoint("GET", "/v1/collections/{collection}", get_collection, "One, and how far its documents are.", "Knowledge"),
    Endpoint("DELETE", "/v1/collections/{collection}", delete_collection, "Delete it with all it holds.", "Knowledge"),
    Endpoint(
        "POST",
        "/v1/collections/{collection}/search",
        search_collection,
        "Search it.",
        "Knowledge",
        SearchRequest,
        serves_tokens=True,
    ),
    Endpoint(
        "POST",
        "/v1/collections/{collection}/documents",
        add_document,
        "Add a document.",
        "Knowledge",
        DocumentRequest,
        query=FileQuery,
        form=DOCUMENT_FORM,
    ),
    Endpoint(
        "GET",
        "/v1/collections/{collection}/documents",
        list_documents,
        "Its documents.",
        "Knowledge",
        query=DocumentsQuery,
    ),
    Endpoint("GET", "/v1/collections/{collection}/documents/{document}", get_document, "One document.", "Knowledge"),
    Endpoint(
        "PUT",
        "/v1/collections/{collection}/documents/{document}",
        put_document,
        "Add it, or replace it.",
        "Knowledge",
        DocumentRequest,
        query=FileQuery,
        form=DOCUMENT_FORM,
    ),
    Endpoint("DELETE", "/v1/collections/{collection}/documents/{document}", delete_document, "Delete it.", "Knowledge"),
    Endpoint(
        "GET",
        "/v1/collections/{collection}/documents/{document}/chunks",
        list_chunks,
        "What it was cut into.",
        "Knowledge",
    ),
    Endpoint("GET", "/v1/collections/{collection}/chunks/{chunk}", get_chunk, "What a citation names.", "Knowledge"),
    Endpoint("GET", "/v1/traces", list_traces, "Timelines of the newest requests.", "Accounts", query=TracesQuery),
    Endpoint("GET", "/v1/traces/{request}", get_trace, "Where the time of a request went.", "Accounts"),
    Endpoint("POST", "/v1/feedback", give_feedback, "Say what you think of an answer.", "Accounts", FeedbackRequest),
    Endpoint(
        "GET",
        "/v1/admin/feedback",
        list_feedback,
        "What users think of answers.",
        "Admin",
        query=FeedbackQuery,
        scope="admin",
    ),
    Endpoint("GET", "/v1/usage", usage, "What was used and what it cost.", "Accounts", query=UsageQuery),
    Endpoint(
        "GET",
        "/v1/admin/requests",
        list_requests,
        "The newest requests.",
        "Admin",
        query=RequestsQuery,
        scope="admin",
    ),
    Endpoint("GET", "/v1/admin/tenants", list_tenants, "The tenants there are.", "Admin", scope="admin"),
    Endpoint("POST", "/v1/admin/tenants", create_tenant, "Make a tenant.", "Admin", TenantRequest, scope="admin"),
    Endpoint(
        "PATCH", "/v1/admin/tenants/{tenant}", change_tenant, "Change a tenant.", "Admin", TenantChange, scope="admin"
    ),
    Endpoint(
        "GET", "/v1/admin/tenants/{tenant}", get_tenant, "A tenant, its limits, what it spent.", "Admin", scope="admin"
    ),
    Endpoint("GET", "/v1/admin/keys", list_keys, "The keys there are, without their secrets.", "Admin", scope="admin"),
    Endpoint("POST", "/v1/admin/keys", create_key, "Make a key.", "Admin", KeyRequest, scope="admin"),
    Endpoint("PATCH", "/v1/admin/keys/{key}", change_key, "Change a key.", "Admin", KeyChange, scope="admin"),
    Endpoint("DELETE", "/v1/admin/keys/{key}", revoke_key, "Revoke a key.", "Admin", scope="admin"),
    Endpoint("GET", "/health/live", live, "Is the process alive?", "Health", scope=None, logged=False),
    Endpoint("GET", "/health/ready", ready, "Does every model produce tokens?", "Health", scope=None, logged=False),
    Endpoint("GET", "/metrics", metrics, "Prometheus metrics.", "Health", scope="metrics", hot=True, logged=False),
)
