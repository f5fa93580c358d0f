"""The table of endpoints; `openapi.py` documents it."""

from __future__ import annotations

from penstock.gateway.api.account import AccountEndpoints
from penstock.gateway.api.admin.request_log import OwnRequestsQuery, RequestLogEndpoints
from penstock.gateway.api.admin.traces import TraceEndpoints, TracesQuery
from penstock.gateway.api.admin.usage import UsageEndpoints, UsageQuery
from penstock.gateway.api.admin_endpoints import ADMIN
from penstock.gateway.api.anthropic.endpoints import MessageEndpoints
from penstock.gateway.api.anthropic.schemas import CountTokensRequest, MessagesRequest
from penstock.gateway.api.openai.chat import ChatEndpoints
from penstock.gateway.api.openai.completions import CompletionEndpoints
from penstock.gateway.api.openai.embeddings import EmbeddingEndpoints
from penstock.gateway.api.openai.models import ModelEndpoints
from penstock.gateway.api.openai.rerank import RerankEndpoints
from penstock.gateway.api.openai.responses.endpoints import ResponseEndpoints
from penstock.gateway.api.openai.responses.schemas import InputTokensRequest, ResponsesRequest
from penstock.gateway.api.openai.responses.stored import ItemsQuery, ResponseQuery, StoredResponseEndpoints
from penstock.gateway.api.openai.score import ScoreEndpoints
from penstock.gateway.api.openai.tokenize import TokenEndpoints
from penstock.gateway.api.operations.health import HealthEndpoints
from penstock.gateway.api.operations.metrics import MetricsEndpoints
from penstock.gateway.app.dialects import ANTHROPIC
from penstock.gateway.app.endpoint import Endpoint
from penstock.gateway.batches.batch_endpoints import BatchEndpoints, BatchesQuery, BatchRequest
from penstock.gateway.batches.file_endpoints import FILE_FORM, FileEndpoints, FilesQuery
from penstock.gateway.batches.message_batches import (
    MessageBatchEndpoints,
    MessageBatchesQuery,
    MessageBatchQuery,
    MessageBatchRequest,
)
from penstock.gateway.conversations.endpoints import ConversationEndpoints, ConversationQuery, ConversationsQuery
from penstock.gateway.generation.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from penstock.gateway.moderation.endpoints import ModerationEndpoints, ModerationsRequest
from penstock.gateway.quality.endpoints import FeedbackEndpoints, FeedbackRequest
from penstock.gateway.rag.collection_endpoints import CollectionEndpoints, CollectionRequest, PageQuery
from penstock.gateway.rag.document_endpoints import (
    DOCUMENT_FORM,
    DocumentEndpoints,
    DocumentRequest,
    DocumentsQuery,
    FileQuery,
)
from penstock.gateway.rag.schemas import SearchRequest
from penstock.gateway.response_cache.endpoints import CacheEndpoints, CacheQuery
from penstock.gateway.server_tools.endpoints import ToolEndpoints

ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/chat/completions",
        ChatEndpoints.chat_completions,
        "Answer a conversation, streamed or whole.",
        "Inference",
        ChatRequest,
        serves_tokens=True,
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        CompletionEndpoints.completions,
        "Continue text or token ids.",
        "Inference",
        CompletionRequest,
        serves_tokens=True,
    ),
    Endpoint(
        "POST",
        "/v1/responses",
        ResponseEndpoints.create_response,
        "Answer a conversation, which may be stored and continued.",
        "Inference",
        ResponsesRequest,
        serves_tokens=True,
    ),
    Endpoint(
        "POST",
        "/v1/responses/input_tokens",
        ResponseEndpoints.count_input_tokens,
        "Count the tokens of a response's prompt.",
        "Tokens",
        InputTokensRequest,
        serves_tokens=True,
    ),
    Endpoint(
        "GET",
        "/v1/responses/{response}",
        StoredResponseEndpoints.get_response,
        "A stored response, whole or as events.",
        "Inference",
        query=ResponseQuery,
    ),
    Endpoint(
        "DELETE",
        "/v1/responses/{response}",
        StoredResponseEndpoints.delete_response,
        "Delete a stored response.",
        "Inference",
    ),
    Endpoint(
        "GET",
        "/v1/responses/{response}/input_items",
        StoredResponseEndpoints.list_input_items,
        "What a stored response answers.",
        "Inference",
        query=ItemsQuery,
    ),
    Endpoint(
        "POST",
        "/v1/responses/{response}/cancel",
        StoredResponseEndpoints.cancel_response,
        "Cancel a response in the background; there are none.",
        "Inference",
    ),
    Endpoint("GET", "/v1/tools", ToolEndpoints.list_tools, "Tools that the server runs for you.", "Inference"),
    Endpoint(
        "GET",
        "/v1/conversations",
        ConversationEndpoints.list_conversations,
        "A user's conversations.",
        "Conversations",
        query=ConversationsQuery,
    ),
    Endpoint(
        "GET",
        "/v1/conversations/{conversation}",
        ConversationEndpoints.get_conversation,
        "A conversation with its messages.",
        "Conversations",
        query=ConversationQuery,
    ),
    Endpoint(
        "DELETE",
        "/v1/conversations/{conversation}",
        ConversationEndpoints.delete_conversation,
        "Delete a conversation.",
        "Conversations",
        query=ConversationQuery,
    ),
    Endpoint(
        "POST",
        "/v1/messages",
        MessageEndpoints.create_message,
        "Answer a conversation (Messages API).",
        "Inference",
        MessagesRequest,
        serves_tokens=True,
        dialect=ANTHROPIC,
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        MessageEndpoints.count_tokens,
        "Count the tokens of a conversation.",
        "Tokens",
        CountTokensRequest,
        serves_tokens=True,
        dialect=ANTHROPIC,
    ),
    Endpoint(
        "POST",
        "/v1/messages/batches",
        MessageBatchEndpoints.create_message_batch,
        "Run many requests of the Messages API.",
        "Batches",
        MessageBatchRequest,
        query=MessageBatchQuery,
        dialect=ANTHROPIC,
    ),
    Endpoint(
        "GET",
        "/v1/messages/batches",
        MessageBatchEndpoints.list_message_batches,
        "List batches of messages.",
        "Batches",
        query=MessageBatchesQuery,
        dialect=ANTHROPIC,
    ),
    Endpoint(
        "GET",
        "/v1/messages/batches/{batch}",
        MessageBatchEndpoints.get_message_batch,
        "A batch of messages and its progress.",
        "Batches",
        query=MessageBatchQuery,
        dialect=ANTHROPIC,
    ),
    Endpoint(
        "DELETE",
        "/v1/messages/batches/{batch}",
        MessageBatchEndpoints.delete_message_batch,
        "Delete a batch of messages that has ended, with its results.",
        "Batches",
        query=MessageBatchQuery,
        dialect=ANTHROPIC,
    ),
    Endpoint(
        "POST",
        "/v1/messages/batches/{batch}/cancel",
        MessageBatchEndpoints.cancel_message_batch,
        "Cancel a batch of messages.",
        "Batches",
        query=MessageBatchQuery,
        dialect=ANTHROPIC,
    ),
    Endpoint(
        "GET",
        "/v1/messages/batches/{batch}/results",
        MessageBatchEndpoints.message_batch_results,
        "The results of a batch of messages, as JSON lines.",
        "Batches",
        query=MessageBatchQuery,
        dialect=ANTHROPIC,
    ),
    Endpoint(
        "POST",
        "/v1/embeddings",
        EmbeddingEndpoints.embeddings,
        "Embed texts.",
        "Inference",
        EmbeddingsRequest,
        serves_tokens=True,
    ),
    Endpoint(
        "POST",
        "/v1/rerank",
        RerankEndpoints.rerank,
        "Rank documents by relevance to a query.",
        "Inference",
        RerankRequest,
        serves_tokens=True,
    ),
    *(
        Endpoint(
            "POST",
            path,
            RerankEndpoints.rerank,
            "The same under the paths of vLLM and Cohere.",
            "Inference",
            RerankRequest,
            serves_tokens=True,
        )
        for path in ("/rerank", "/v2/rerank")
    ),
    *(
        Endpoint(
            "POST",
            path,
            ScoreEndpoints.score,
            "How well pairs of texts go together.",
            "Inference",
            ScoreRequest,
            serves_tokens=True,
        )
        for path in ("/v1/score", "/score")
    ),
    Endpoint(
        "POST",
        "/pooling",
        EmbeddingEndpoints.pooling,
        "Vectors of texts or of their tokens.",
        "Inference",
        PoolingRequest,
        serves_tokens=True,
    ),
    Endpoint(
        "POST",
        "/v1/moderations",
        ModerationEndpoints.moderations,
        "What the guardrails say about texts.",
        "Inference",
        ModerationsRequest,
        serves_tokens=True,
    ),
    Endpoint("POST", "/v1/files", FileEndpoints.create_file, "Upload a file of requests.", "Batches", form=FILE_FORM),
    Endpoint("GET", "/v1/files", FileEndpoints.list_files, "List files.", "Batches", query=FilesQuery),
    Endpoint("GET", "/v1/files/{file}", FileEndpoints.get_file, "Metadata of a file.", "Batches"),
    Endpoint("DELETE", "/v1/files/{file}", FileEndpoints.delete_file, "Delete a file.", "Batches"),
    Endpoint("GET", "/v1/files/{file}/content", FileEndpoints.file_content, "The content of a file.", "Batches"),
    Endpoint(
        "POST", "/v1/batches", BatchEndpoints.create_batch, "Run the requests in a file.", "Batches", BatchRequest
    ),
    Endpoint("GET", "/v1/batches", BatchEndpoints.list_batches, "List batches.", "Batches", query=BatchesQuery),
    Endpoint("GET", "/v1/batches/{batch}", BatchEndpoints.get_batch, "A batch and its progress.", "Batches"),
    Endpoint("POST", "/v1/batches/{batch}/cancel", BatchEndpoints.cancel_batch, "Cancel a batch.", "Batches"),
    Endpoint("GET", "/v1/cache", CacheEndpoints.show_cache, "Your tenant's cached answers.", "Inference"),
    Endpoint(
        "DELETE",
        "/v1/cache",
        CacheEndpoints.evict_cache,
        "Delete your tenant's cached answers.",
        "Inference",
        query=CacheQuery,
    ),
    Endpoint("GET", "/v1/models", ModelEndpoints.list_models, "The models served here.", "Models"),
    Endpoint("GET", "/v1/models/{model:path}", ModelEndpoints.get_model, "One model.", "Models"),
    Endpoint(
        "POST",
        "/v1/tokenize",
        TokenEndpoints.tokenize,
        "Tokens, their number and price, without inference.",
        "Tokens",
        TokenizeRequest,
        serves_tokens=True,
    ),
    Endpoint(
        "POST",
        "/v1/detokenize",
        TokenEndpoints.detokenize,
        "Decode token ids.",
        "Tokens",
        DetokenizeRequest,
        serves_tokens=True,
    ),
    Endpoint(
        "POST",
        "/tokenize",
        TokenEndpoints.tokenize,
        "The same under vLLM's path.",
        "Tokens",
        TokenizeRequest,
        serves_tokens=True,
    ),
    Endpoint(
        "POST",
        "/detokenize",
        TokenEndpoints.detokenize,
        "The same under vLLM's path.",
        "Tokens",
        DetokenizeRequest,
        serves_tokens=True,
    ),
    Endpoint(
        "POST",
        "/v1/collections",
        CollectionEndpoints.create_collection,
        "Create a collection.",
        "Knowledge",
        CollectionRequest,
    ),
    Endpoint(
        "GET",
        "/v1/collections",
        CollectionEndpoints.list_collections,
        "List collections.",
        "Knowledge",
        query=PageQuery,
    ),
    Endpoint(
        "GET",
        "/v1/collections/{collection}",
        CollectionEndpoints.get_collection,
        "A collection and the progress of its documents.",
        "Knowledge",
    ),
    Endpoint(
        "DELETE",
        "/v1/collections/{collection}",
        CollectionEndpoints.delete_collection,
        "Delete a collection with its documents.",
        "Knowledge",
    ),
    Endpoint(
        "POST",
        "/v1/collections/{collection}/search",
        CollectionEndpoints.search_collection,
        "Search a collection.",
        "Knowledge",
        SearchRequest,
        serves_tokens=True,
    ),
    Endpoint(
        "POST",
        "/v1/collections/{collection}/documents",
        DocumentEndpoints.add_document,
        "Add a document.",
        "Knowledge",
        DocumentRequest,
        query=FileQuery,
        form=DOCUMENT_FORM,
    ),
    Endpoint(
        "GET",
        "/v1/collections/{collection}/documents",
        DocumentEndpoints.list_documents,
        "List the documents of a collection.",
        "Knowledge",
        query=DocumentsQuery,
    ),
    Endpoint(
        "GET",
        "/v1/collections/{collection}/documents/{document}",
        DocumentEndpoints.get_document,
        "A document.",
        "Knowledge",
    ),
    Endpoint(
        "PUT",
        "/v1/collections/{collection}/documents/{document}",
        DocumentEndpoints.put_document,
        "Add or replace a document.",
        "Knowledge",
        DocumentRequest,
        query=FileQuery,
        form=DOCUMENT_FORM,
    ),
    Endpoint(
        "DELETE",
        "/v1/collections/{collection}/documents/{document}",
        DocumentEndpoints.delete_document,
        "Delete a document.",
        "Knowledge",
    ),
    Endpoint(
        "GET",
        "/v1/collections/{collection}/documents/{document}/chunks",
        DocumentEndpoints.list_chunks,
        "The chunks of a document.",
        "Knowledge",
    ),
    Endpoint(
        "GET",
        "/v1/collections/{collection}/chunks/{chunk}",
        DocumentEndpoints.get_chunk,
        "A chunk, as citations name it.",
        "Knowledge",
    ),
    Endpoint(
        "GET",
        "/v1/traces",
        TraceEndpoints.list_traces,
        "Timelines of the newest requests.",
        "Accounts",
        query=TracesQuery,
    ),
    Endpoint("GET", "/v1/traces/{request}", TraceEndpoints.get_trace, "Where the time of a request went.", "Accounts"),
    Endpoint(
        "POST",
        "/v1/feedback",
        FeedbackEndpoints.give_feedback,
        "Rate an answer.",
        "Accounts",
        FeedbackRequest,
    ),
    Endpoint("GET", "/v1/usage", UsageEndpoints.usage, "Usage and cost.", "Accounts", query=UsageQuery),
    Endpoint("GET", "/v1/account", AccountEndpoints.show_account, "Your limits and spending.", "Accounts"),
    Endpoint("GET", "/v1/keys", AccountEndpoints.list_own_keys, "Your tenant's keys, without secrets.", "Accounts"),
    Endpoint(
        "GET",
        "/v1/requests",
        RequestLogEndpoints.list_own_requests,
        "Your newest requests.",
        "Accounts",
        query=OwnRequestsQuery,
    ),
    *ADMIN,
    Endpoint("GET", "/", HealthEndpoints.root, "Does anything listen here?", "Health", scope=None, logged=False),
    Endpoint("GET", "/health", HealthEndpoints.health, "Can any model answer?", "Health", scope=None, logged=False),
    Endpoint("GET", "/ping", HealthEndpoints.ping, "The same as /health.", "Health", scope=None, logged=False),
    Endpoint("GET", "/version", HealthEndpoints.version, "Its version.", "Health", scope=None, logged=False),
    Endpoint("GET", "/health/live", HealthEndpoints.live, "Is the process alive?", "Health", scope=None, logged=False),
    Endpoint(
        "GET",
        "/health/ready",
        HealthEndpoints.ready,
        "Does every model produce tokens?",
        "Health",
        scope=None,
        logged=False,
    ),
    Endpoint(
        "GET", "/metrics", MetricsEndpoints.metrics, "Prometheus metrics.", "Health", scope="metrics", logged=False
    ),
)
