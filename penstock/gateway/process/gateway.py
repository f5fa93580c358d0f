"""What a gateway consists of, once `composition` has started it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from penstock.conversations import Sessions
from penstock.gateway.accounting.admission import Admissions
from penstock.gateway.accounting.charges import Accounts, NoAccounts
from penstock.gateway.accounting.encoder_work import EncoderWork
from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.api.admin.supervisor import Supervisor
from penstock.gateway.api.openai.responses.background import BackgroundResponses
from penstock.gateway.api.openai.responses.store import NoResponseStore, ResponseStore
from penstock.gateway.api.operations.health import Check
from penstock.gateway.app.authentication import OpenAuthentication
from penstock.gateway.app.background import BackgroundTasks
from penstock.gateway.app.bodies import Bodies
from penstock.gateway.app.drain import Drain
from penstock.gateway.app.tracing import RequestTracing
from penstock.gateway.batches.runner import BatchRunner
from penstock.gateway.conversations.turn import StatelessConversations, StoredConversations
from penstock.gateway.generation.experiments import Experiments
from penstock.gateway.generation.input_files import InputFiles
from penstock.gateway.generation.model_routes import Routes
from penstock.gateway.generation.permissions import Permissions
from penstock.gateway.generation.pipeline import GenerationPipeline
from penstock.gateway.generation.tokenization import Tokenization
from penstock.gateway.generation.watermarks import Watermarks
from penstock.gateway.moderation.guardrails import Guardrails
from penstock.gateway.process.request_log import RequestLogOff
from penstock.gateway.process.settings import GatewaySettings
from penstock.gateway.process.stores import Stores
from penstock.gateway.quality.judge import Judge, NoJudge
from penstock.gateway.rag.library import KnowledgeLibrary
from penstock.gateway.response_cache.cache import ResponseCache, ResponseCacheOff
from penstock.gateway.server_tools.answers import ToolAnswers
from penstock.gateway.webhooks.delivery import WebhookClient
from penstock.gateway.workers.group import WorkerGroup
from penstock.identity.data_rules import DataRules
from penstock.metering.audit import AuditLog
from penstock.metering.request_log import RequestLog
from penstock.routing.encoders import Encoders
from penstock.routing.registry import ModelRegistry
from penstock.storage import Database
from penstock.telemetry.metrics import Metrics
from penstock.tools.execution import ToolRegistry


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts of a running gateway: its endpoints are made of them, and the process that runs it uses some.

    A part that may be missing is None, or of a class that says so.
    """

    settings: GatewaySettings
    # What everything else uses.
    metrics: Metrics
    tracing: RequestTracing
    drain: Drain
    background: BackgroundTasks
    checks: Mapping[str, Check]
    """What readiness depends on, by name."""
    bodies: Bodies
    database: Database | None
    stores: Stores | None
    audit: AuditLog | None
    request_log: RequestLog | RequestLogOff
    # Who may use how much, and what it costs.
    authentication: OpenAuthentication
    workers: WorkerGroup
    permissions: Permissions
    data_rules: DataRules
    quotas: Quotas
    accounts: Accounts | NoAccounts
    admissions: Admissions
    # What answers.
    registry: ModelRegistry
    encoders: Encoders
    supervisor: Supervisor
    routes: Routes
    experiments: Experiments
    tokenization: Tokenization
    watermarks: Watermarks
    guardrails: Guardrails
    cache: ResponseCache | ResponseCacheOff
    forget_answers: Callable[[str], Awaitable[None]]
    """Drops a model's answers from the cache."""
    judge: Judge | NoJudge
    knowledge: KnowledgeLibrary
    tools: ToolRegistry
    pipeline: GenerationPipeline
    sessions: Sessions | None
    conversations: StoredConversations | StatelessConversations
    server_tools: ToolAnswers
    encoder_work: EncoderWork
    input_files: InputFiles
    responses: ResponseStore | NoResponseStore
    background_responses: BackgroundResponses | None
    batch_runner: BatchRunner | None
    webhook_client: WebhookClient | None
