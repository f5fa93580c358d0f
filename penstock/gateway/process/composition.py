"""Builds the gateway: the one place that knows every feature."""

from __future__ import annotations

import asyncio

from penstock.gateway.accounting.encoder_work import EncoderWork
from penstock.gateway.api.admin.adapters import AdapterEndpoints
from penstock.gateway.api.admin.identity import IdentityEndpoints
from penstock.gateway.api.admin.models import ModelAdminEndpoints
from penstock.gateway.api.admin.replicas import ReplicaEndpoints
from penstock.gateway.api.admin.request_log import RequestLogEndpoints
from penstock.gateway.api.admin.routes import RouteEndpoints
from penstock.gateway.api.admin.sleep import SleepEndpoints
from penstock.gateway.api.admin.supervisor import NoSupervisor
from penstock.gateway.api.admin.traces import TraceEndpoints
from penstock.gateway.api.admin.usage import UsageEndpoints
from penstock.gateway.api.openai.embeddings import EmbeddingEndpoints
from penstock.gateway.api.openai.models import ModelEndpoints
from penstock.gateway.api.openai.rerank import RerankEndpoints
from penstock.gateway.api.openai.tokenize import TokenEndpoints
from penstock.gateway.api.operations.health import HealthEndpoints
from penstock.gateway.api.operations.metrics import MetricsEndpoints
from penstock.gateway.app.endpoint import Unavailable
from penstock.gateway.batches.batch_endpoints import BatchEndpoints
from penstock.gateway.batches.file_endpoints import FileEndpoints
from penstock.gateway.conversations.endpoints import ConversationEndpoints, NoConversations
from penstock.gateway.process.service import Service
from penstock.gateway.quality.endpoints import FeedbackEndpoints
from penstock.gateway.rag.collection_endpoints import CollectionEndpoints
from penstock.gateway.rag.document_endpoints import DocumentEndpoints
from penstock.gateway.response_cache.endpoints import CacheEndpoints
from penstock.gateway.server_tools.endpoints import ToolEndpoints
from penstock.metering.request_store import RequestStore
from penstock.protocol.errors import KeyStoreUnavailable, NotFound, ServiceUnavailable

UPLOADS = 4
"""Files that are read at the same time: each is in memory while it is read."""


def endpoint_owners(service: Service) -> list[object]:
    """The objects whose methods answer endpoints."""
    settings, registry, limit = service.settings, service.registry, service.settings.body_limit
    uploads = asyncio.Semaphore(UPLOADS)
    encoder_work = EncoderWork(
        service.encoders, service.quotas, service.accounts, service.encoder_metrics, service.background
    )
    supervisor = service.control or NoSupervisor()
    models = ModelEndpoints(registry, service.encoders, service.routes, service.quotas, settings.max_tokens)

    async def suspect(tenant: str, response_id: str) -> None:
        if service.recall is not None:
            await service.recall.suspect(tenant, response_id)

    async def forget_answers(model: str) -> None:
        if service.recall is not None:
            await service.recall.store.evict(model=model)

    owners: list[object] = [
        EmbeddingEndpoints(service.encoders, encoder_work, service.guardrails, limit),
        RerankEndpoints(service.encoders, encoder_work, service.guardrails, limit),
        TokenEndpoints(registry, service.tokenization, limit),
        models,
        NoConversations() if service.sessions is None else ConversationEndpoints(service.sessions),
        CollectionEndpoints(service.knowledge, encoder_work, limit),
        DocumentEndpoints(service.knowledge, uploads),
        ToolEndpoints(service.tools, limit),
        TraceEndpoints(service.workers, settings.telemetry.recent_requests),
        AdapterEndpoints(registry, forget_answers, settings.engine_wait_s, limit),
        ModelAdminEndpoints(
            registry, models, service.routes, service.admissions, supervisor, settings.engine_wait_s, limit
        ),
        ReplicaEndpoints(registry, supervisor, limit),
        RouteEndpoints(service.routes, limit),
        SleepEndpoints(registry),
        HealthEndpoints(registry, service.drain),
        MetricsEndpoints(service.workers),
    ]
    if service.recall is not None:
        owners.append(CacheEndpoints(service.recall))
    else:
        message = "This server has no response cache; `cache.exact` and `cache.semantic` are off."
        owners.append(Unavailable(CacheEndpoints, NotFound, message))
    log = service.request_log
    if log is not None and isinstance(log.sink, RequestStore):
        owners.append(RequestLogEndpoints(log.sink))
    else:
        message = "This gateway has no request log that it could read; see `request_log.url`."
        owners.append(Unavailable(RequestLogEndpoints, ServiceUnavailable, message))
    if service.database is None:
        no_accounts = "This gateway keeps no accounts, so it cannot tell whose an answer is."
        return [
            *owners,
            Unavailable(FileEndpoints, ServiceUnavailable, "This gateway has no store for files."),
            Unavailable(BatchEndpoints, ServiceUnavailable, "This gateway has no store for batches."),
            Unavailable(FeedbackEndpoints, ServiceUnavailable, no_accounts),
            Unavailable(UsageEndpoints, ServiceUnavailable, "This gateway keeps no accounts."),
            Unavailable(
                IdentityEndpoints, KeyStoreUnavailable, "This gateway runs without a store for tenants and keys."
            ),
        ]
    assert service.files and service.batches and service.batch_runner and service.feedback
    assert service.accounts and service.identities
    return [
        *owners,
        FileEndpoints(service.files, service.batches, settings.batches, uploads),
        BatchEndpoints(service.batches, service.files, service.batch_runner, limit),
        FeedbackEndpoints(service.feedback, suspect, limit),
        UsageEndpoints(service.accounts.ledger),
        IdentityEndpoints(
            service.identities,
            service.accounts.ledger,
            service.quotas,
            service.workers.keys_changed,
            [tier.name for tier in settings.tiers],
            settings.default_tier,
            limit,
        ),
    ]
