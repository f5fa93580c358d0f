"""The table of endpoints; `openapi.py` documents it."""

from __future__ import annotations

from penstock.gateway.api.account import AccountEndpoints
from penstock.gateway.api.admin.request_log import OwnRequestsQuery, RequestLogEndpoints
from penstock.gateway.api.admin.traces import TraceEndpoints, TracesQuery
from penstock.gateway.api.admin.usage import UsageEndpoints, UsageQuery
from penstock.gateway.api.admin_endpoints import ADMIN
from penstock.gateway.api.anthropic.models import ModelsQuery
from penstock.gateway.api.generation_endpoints import GENERATION
from penstock.gateway.api.knowledge_endpoints import KNOWLEDGE
from penstock.gateway.api.native_endpoints import NATIVE
from penstock.gateway.api.ollama_endpoints import OLLAMA
from penstock.gateway.api.openai.embeddings import EmbeddingEndpoints
from penstock.gateway.api.openai.models import ModelEndpoints
from penstock.gateway.api.openai.rerank import RerankEndpoints
from penstock.gateway.api.openai.score import ScoreEndpoints
from penstock.gateway.api.openai.tokenize import TokenEndpoints, TokenizerQuery
from penstock.gateway.api.openai.watermark import DetectRequest, WatermarkEndpoints
from penstock.gateway.api.operations.health import HealthEndpoints
from penstock.gateway.api.operations.metrics import MetricsEndpoints
from penstock.gateway.api.webhook_endpoints import WEBHOOK_ADMIN, WEBHOOKS
from penstock.gateway.app.dialects import LLAMA_CPP, TGI
from penstock.gateway.app.endpoint import Endpoint
from penstock.gateway.batches.batch_endpoints import BatchEndpoints, BatchesQuery, BatchRequest
from penstock.gateway.batches.file_endpoints import FILE_FORM, FileEndpoints, FilesQuery
from penstock.gateway.batches.upload_endpoints import PART_FORM, CompleteRequest, UploadEndpoints, UploadRequest
from penstock.gateway.generation.schemas import (
    DetokenizeRequest,
    EmbeddingsRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from penstock.gateway.moderation.endpoints import ModerationEndpoints, ModerationsRequest
from penstock.gateway.quality.endpoints import FeedbackEndpoints, FeedbackRequest
from penstock.gateway.response_cache.endpoints import CacheEndpoints, CacheQuery

ENDPOINTS = (
    *GENERATION,
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
        "POST",
        "/v1/uploads",
        UploadEndpoints.create_upload,
        "Begin a file that is sent in parts.",
        "Batches",
        UploadRequest,
    ),
    Endpoint(
        "POST",
        "/v1/uploads/{upload}/parts",
        UploadEndpoints.add_upload_part,
        "Send a part of a file.",
        "Batches",
        form=PART_FORM,
    ),
    Endpoint(
        "POST",
        "/v1/uploads/{upload}/complete",
        UploadEndpoints.complete_upload,
        "Make a file of the parts.",
        "Batches",
        CompleteRequest,
    ),
    Endpoint("POST", "/v1/uploads/{upload}/cancel", UploadEndpoints.cancel_upload, "Cancel an upload.", "Batches"),
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
    Endpoint("GET", "/v1/models", ModelEndpoints.list_models, "The models served here.", "Models", query=ModelsQuery),
    Endpoint("GET", "/v1/models/{model:path}", ModelEndpoints.get_model, "One model.", "Models"),
    Endpoint(
        "POST",
        "/v1/tokenize",
        TokenEndpoints.tokenize,
        "Tokens, their number and price, without inference.",
        "Tokens",
        TokenizeRequest,
        serves_tokens=True,
        other_dialects=(LLAMA_CPP, TGI),
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
        "/v1/watermark/detect",
        WatermarkEndpoints.detect,
        "Whether a text carries the watermark of your tenant.",
        "Tokens",
        DetectRequest,
        serves_tokens=True,
    ),
    Endpoint(
        "POST",
        "/tokenize",
        TokenEndpoints.tokenize,
        "The same under the path of vLLM and llama.cpp, in either form.",
        "Tokens",
        TokenizeRequest,
        serves_tokens=True,
        other_dialects=(LLAMA_CPP, TGI),
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
        "GET",
        "/tokenizer_info",
        TokenEndpoints.tokenizer_info,
        "Special tokens, chat template and size of a model's tokenizer.",
        "Tokens",
        query=TokenizerQuery,
    ),
    *KNOWLEDGE,
    *WEBHOOKS,
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
    *OLLAMA,
    *NATIVE,
    *ADMIN,
    *WEBHOOK_ADMIN,
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
