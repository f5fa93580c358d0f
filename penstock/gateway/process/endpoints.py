"""What requests reach: the endpoints of a gateway, made of its parts."""

from __future__ import annotations

from penstock.gateway.api.admin.adapters import AdapterEndpoints
from penstock.gateway.api.admin.experiments import ExperimentEndpoints
from penstock.gateway.api.admin.fleet import FleetEndpoints
from penstock.gateway.api.admin.kv import KVEndpoints
from penstock.gateway.api.admin.models import ModelAdminEndpoints
from penstock.gateway.api.admin.plan import PlanEndpoints
from penstock.gateway.api.admin.replicas import ReplicaEndpoints
from penstock.gateway.api.admin.routes import RouteEndpoints
from penstock.gateway.api.admin.sleep import SleepEndpoints
from penstock.gateway.api.admin.traces import TraceEndpoints
from penstock.gateway.api.admin.what_if import WhatIfEndpoints
from penstock.gateway.api.anthropic.endpoints import MessageEndpoints
from penstock.gateway.api.llama_cpp.endpoints import LlamaCppEndpoints
from penstock.gateway.api.ollama.catalogue import Catalogue
from penstock.gateway.api.ollama.endpoints import OllamaEndpoints
from penstock.gateway.api.ollama.pull import OllamaPullEndpoints
from penstock.gateway.api.openai.chat import ChatEndpoints
from penstock.gateway.api.openai.completions import CompletionEndpoints
from penstock.gateway.api.openai.embeddings import EmbeddingEndpoints
from penstock.gateway.api.openai.models import ModelEndpoints
from penstock.gateway.api.openai.rerank import RerankEndpoints
from penstock.gateway.api.openai.responses.compaction import CompactionEndpoints
from penstock.gateway.api.openai.responses.endpoints import ResponseEndpoints
from penstock.gateway.api.openai.responses.file_search_loop import SearchParts
from penstock.gateway.api.openai.responses.references import ResponseReferences
from penstock.gateway.api.openai.responses.stored import StoredResponseEndpoints
from penstock.gateway.api.openai.score import ScoreEndpoints
from penstock.gateway.api.openai.tokenize import TokenEndpoints
from penstock.gateway.api.openai.watermark import WatermarkEndpoints
from penstock.gateway.api.operations.health import HealthEndpoints
from penstock.gateway.api.operations.metrics import MetricsEndpoints
from penstock.gateway.api.sglang.endpoints import SglangEndpoints
from penstock.gateway.api.tgi.endpoints import TgiEndpoints
from penstock.gateway.app.uploads import UploadSlots
from penstock.gateway.conversations.endpoints import ConversationEndpoints, NoConversations
from penstock.gateway.moderation.endpoints import ModerationEndpoints
from penstock.gateway.process import optional_endpoints as optional
from penstock.gateway.process.gateway import Gateway
from penstock.gateway.rag.collection_endpoints import CollectionEndpoints
from penstock.gateway.rag.document_endpoints import DocumentEndpoints
from penstock.gateway.rag.vector_stores.attachment import Attachment
from penstock.gateway.rag.vector_stores.batch_endpoints import FileBatchEndpoints
from penstock.gateway.rag.vector_stores.endpoints import VectorStoreEndpoints
from penstock.gateway.rag.vector_stores.file_endpoints import VectorStoreFileEndpoints
from penstock.gateway.rag.vector_stores.file_search import FileSearches
from penstock.gateway.server_tools.endpoints import ToolEndpoints


def endpoints_of(gateway: Gateway) -> list[object]:
    """The objects whose methods answer requests; their order does not matter."""
    uploads = UploadSlots()
    return [
        *_generation(gateway),
        *_inference(gateway),
        *_knowledge(gateway, uploads),
        *_administration(gateway),
        *_operation(gateway),
        *optional.of_store(gateway, uploads),
    ]


def _generation(gateway: Gateway) -> list[object]:
    """Chat, completions, responses, messages, and what is stored of them."""
    settings, pipeline, permissions = gateway.settings, gateway.pipeline, gateway.permissions
    limit, files, responses = settings.body_limit, gateway.input_files, gateway.responses
    detached, sessions = gateway.background_responses, gateway.sessions
    chats = None if gateway.stores is None else gateway.stores.chats
    return [
        ChatEndpoints(pipeline, gateway.conversations, gateway.server_tools, chats, files),
        optional.of_stored_chats(chats, permissions, limit),
        CompletionEndpoints(pipeline),
        ResponseEndpoints(
            pipeline,
            gateway.conversations,
            responses,
            detached,
            FileSearches(gateway.knowledge),
            SearchParts(pipeline, settings.tools, gateway.request_log.add),
            files,
        ),
        CompactionEndpoints(pipeline, ResponseReferences(responses, permissions), files),
        StoredResponseEndpoints(responses, permissions, detached),
        MessageEndpoints(pipeline, files),
        NoConversations() if sessions is None else ConversationEndpoints(sessions),
        optional.of_conversation_items(sessions, gateway.guardrails, limit, files),
        ToolEndpoints(gateway.tools, limit),
        optional.of_cache(gateway.cache, permissions),
    ]


def _inference(gateway: Gateway) -> list[object]:
    """Models, and what else is asked of them: vectors, ranks, tokens, moderation; paths of other servers."""
    settings, registry, permissions = gateway.settings, gateway.registry, gateway.permissions
    encoders, work, guardrails = gateway.encoders, gateway.encoder_work, gateway.guardrails
    routes, quotas, tokenization = gateway.routes, gateway.quotas, gateway.tokenization
    limit = settings.body_limit
    models = ModelEndpoints(registry, permissions, encoders, routes, quotas, settings.max_tokens)
    embeddings = EmbeddingEndpoints(encoders, work, guardrails, limit)
    catalogue = Catalogue(registry, permissions, encoders, routes)
    tgi = TgiEndpoints(gateway.pipeline)
    return [
        models,
        ModelAdminEndpoints(
            registry, models, routes, gateway.admissions, gateway.supervisor, settings.engine_wait_s, limit
        ),
        embeddings,
        RerankEndpoints(encoders, work, guardrails, limit),
        ScoreEndpoints(encoders, work, guardrails, limit),
        ModerationEndpoints(guardrails, quotas, limit),
        TokenEndpoints(
            permissions, tokenization, quotas, limit, gateway.input_files, request_templates=settings.request_templates
        ),
        WatermarkEndpoints(permissions, tokenization, quotas, gateway.watermarks, limit),
        OllamaEndpoints(gateway.pipeline, catalogue, embeddings),
        LlamaCppEndpoints(gateway.pipeline, embeddings),
        tgi,
        SglangEndpoints(gateway.pipeline, tgi),
        OllamaPullEndpoints(catalogue, gateway.supervisor, limit),
    ]


def _knowledge(gateway: Gateway, uploads: UploadSlots) -> list[object]:
    """Collections, documents, vector stores."""
    knowledge, work, limit = gateway.knowledge, gateway.encoder_work, gateway.settings.body_limit
    attachment = Attachment(knowledge, None if gateway.stores is None else gateway.stores.files, uploads)
    return [
        CollectionEndpoints(knowledge, work, limit),
        DocumentEndpoints(knowledge, uploads),
        VectorStoreEndpoints(knowledge, attachment, work, limit),
        VectorStoreFileEndpoints(knowledge, attachment, limit),
        FileBatchEndpoints(knowledge, attachment, limit),
    ]


def _administration(gateway: Gateway) -> list[object]:
    settings, registry, supervisor = gateway.settings, gateway.registry, gateway.supervisor
    limit = settings.body_limit
    return [
        AdapterEndpoints(registry, gateway.forget_answers, settings.engine_wait_s, limit),
        ReplicaEndpoints(registry, supervisor, limit),
        FleetEndpoints(supervisor, limit),
        PlanEndpoints(registry, gateway.workers, settings.admission),
        WhatIfEndpoints(registry, limit),
        RouteEndpoints(gateway.routes, limit),
        ExperimentEndpoints(gateway.experiments, limit),
        SleepEndpoints(registry),
        KVEndpoints(registry, settings.share_prefixes),
        optional.of_audit_log(gateway.stores),
        *optional.of_webhooks(gateway.stores, gateway.webhook_client, settings),
    ]


def _operation(gateway: Gateway) -> list[object]:
    """Health, metrics, and what became of requests."""
    permissions, workers = gateway.permissions, gateway.workers
    ledger = None if gateway.stores is None else gateway.stores.ledger
    return [
        HealthEndpoints(gateway.registry, gateway.authentication, gateway.drain, gateway.checks),
        MetricsEndpoints(workers),
        TraceEndpoints(workers, permissions, gateway.settings.telemetry.recent_requests, ledger),
        optional.of_request_log(gateway.request_log, permissions),
    ]
