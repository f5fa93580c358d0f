"""What every endpoint shares: settings, models, metrics, the drain state, and text work kept off the event loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any, ParamSpec, TypeVar

from penstock.backends.base import Backend
from penstock.config.context import ConversationsConfig
from penstock.config.schema import CountersConfig
from penstock.conversations import ConversationStore, Sessions
from penstock.conversations.store import SqlConversations
from penstock.errors import ConfigError
from penstock.gateway.accounting.admission import Admissions
from penstock.gateway.accounting.charges import Accounts
from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.api.openai.responses.store import ResponseStore
from penstock.gateway.app.authentication import Authentication, OpenAuthentication
from penstock.gateway.app.background import BackgroundTasks
from penstock.gateway.app.drain import Drain
from penstock.gateway.app.tracing import RequestTracing
from penstock.gateway.batches.files import FileStore
from penstock.gateway.batches.runner import BatchRunner
from penstock.gateway.batches.store import BatchStore
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.model_routes import Routes
from penstock.gateway.generation.response_format import GrammarDesk
from penstock.gateway.generation.tokenization import Tokenization
from penstock.gateway.moderation.guardrails import Guardrails
from penstock.gateway.process.request_log import open_request_log
from penstock.gateway.process.settings import GatewaySettings
from penstock.gateway.process.supervisor_link import ControlLine
from penstock.gateway.quality.feedback import Feedback
from penstock.gateway.quality.judge import Judge
from penstock.gateway.rag.library import KnowledgeLibrary
from penstock.gateway.response_cache.cache import Recall, open_store
from penstock.gateway.workers.group import CoordinatedWorker, SingleWorker, WorkerGroup
from penstock.identity import Caller, IdentityStore, KeyRing
from penstock.limits import LimitStore
from penstock.metering.ledger import Ledger
from penstock.metering.request_log import RequestLog
from penstock.routing.encoders import Encoders
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.routing.replica_metrics import add_replica_metrics
from penstock.routing.time_slice_groups import TimeSlices
from penstock.storage import Database, open_database
from penstock.storage.database import redacted
from penstock.telemetry.cache_metrics import CacheMetrics
from penstock.telemetry.encoder_metrics import EncoderMetrics
from penstock.telemetry.knowledge_metrics import KnowledgeMetrics
from penstock.telemetry.logging import RequestRecord
from penstock.telemetry.metrics import EngineView, Metrics
from penstock.telemetry.route_metrics import RouteMetrics
from penstock.tools.execution import ToolRegistry
from penstock.tools.execution.specs import ToolSpecStore

P = ParamSpec("P")
T = TypeVar("T")


class Service:
    """One gateway process."""

    def __init__(self, settings: GatewaySettings, registry: ModelRegistry, encoders: Encoders | None = None) -> None:
        self.settings = settings
        self.registry = registry
        self.encoders = encoders or Encoders((), ())
        self.metrics = Metrics(self._views, settings.telemetry.most_series)
        self.encoder_metrics = EncoderMetrics(self.metrics.registry, lambda: self.encoders)
        self.tracing = RequestTracing(settings.telemetry, self.metrics)
        add_replica_metrics(self.metrics.registry, registry)
        self.knowledge = KnowledgeLibrary(
            settings.knowledge, settings.store_url, self.encoders, KnowledgeMetrics(self.metrics.registry)
        )
        self.recall = self._recall()
        self.slices = TimeSlices(registry, settings.time_slice_s)
        self.drain = Drain(lambda: self.metrics.draining.set(1))
        self.background = BackgroundTasks()
        self.tokenization = Tokenization()
        self.authentication = OpenAuthentication(settings.default_tier)
        self.grammars = GrammarDesk(self.metrics)
        self.guardrails = Guardrails(settings.guardrails, self) if settings.guardrails else None
        self.database: Database | None = None
        self.identities: IdentityStore | None = None
        self.accounts: Accounts | None = None
        self.responses: ResponseStore | None = None
        self.feedback: Feedback | None = None
        self.files: FileStore | None = None
        self.batches: BatchStore | None = None
        self.batch_runner: BatchRunner | None = None
        self.request_log: RequestLog | None = None
        self.sessions: Sessions | None = None
        self.tools: ToolRegistry = ToolRegistry()
        self.control: ControlLine | None = None
        """The line to the supervisor, where there is one."""
        self.judge: Judge | None = None
        self.workers = worker_group(settings, self.metrics, self.tracing, lambda: self.authentication.refresh())
        self.prices = settings.price_book()
        self.quotas = Quotas(
            _counters(settings.counters, self.workers.limits), settings.tiers, settings.limits, self.prices
        )
        self.admissions = Admissions(settings, registry, self.metrics)
        self.routes = Routes(settings.routes, registry, self.encoders, RouteMetrics(self.metrics.registry))

    async def start(self) -> None:
        await self.workers.start()
        if self.settings.store_url is not None:
            self.database = await open_database(self.settings.store_url)
            self.identities = IdentityStore(self.database)
            await self.identities.prepare()
            keyring = KeyRing(
                self.identities,
                default_tier=self.settings.default_tier,
                fresh_s=self.settings.key_fresh_s,
                grace_s=self.settings.key_grace_s,
            )
            self.authentication = Authentication(keyring, self.settings.default_tier)
            if self.settings.responses_per_tenant:
                self.responses = ResponseStore(
                    self.database, keep_s=self.settings.keep_responses_s, most=self.settings.responses_per_tenant
                )
                await self.responses.prepare()
            self.feedback = Feedback(self.database, self.metrics.registry)
            await self.feedback.prepare()
            self.files = FileStore(self.database, keep_s=self.settings.batches.keep_files_s)
            await self.files.prepare()
            self.batches = BatchStore(self.database)
            await self.batches.prepare()
            self.batch_runner = BatchRunner(
                self.batches,
                self.files,
                self.authentication.holder,
                lines_at_once=self.settings.batches.lines_at_once,
                most_lines=self.settings.batches.most_lines,
                lease_s=self.settings.gateway_timeout_s,
                metrics=self.metrics.registry,
            )
            self.accounts = Accounts(
                Ledger(self.database, durable=self.settings.durable_charges),
                self.prices,
                self.registry,
                self.metrics.usage,
                dead_after_s=self.settings.gateway_timeout_s,
                patience_s=self.settings.ledger_wait_s,
            )
            await self.accounts.start()
        await self.routes.start(self.database)
        self.sessions = open_sessions(self.settings.conversations, self.database)
        if self.sessions is not None:
            await self.sessions.start()
        self.tools = await self._open_tools()
        if self.settings.judge.rate:
            self.judge = Judge(self, self.settings.judge)
            self.judge.start()
        self.request_log = open_request_log(self.settings, self.database, self.metrics)
        if self.request_log is not None:
            self.request_log.start()
        await self.knowledge.start(self.database)
        for backend in self._backends():
            await backend.start()
        for remote in self.registry.remotes.values():
            await remote.start()
        if self.control is not None:
            await self.control.start()
        self.slices.start()
        await self.admissions.start()

    async def close(self) -> None:
        if self.control is not None:
            await self.control.close()
        if self.batch_runner is not None:
            await self.batch_runner.close()
        await self.slices.close()
        await self.admissions.close()
        for remote in self.registry.remotes.values():
            await remote.close()
        if self.sessions is not None:
            await self.sessions.close()
        if self.judge is not None:
            await self.judge.close()
        await self.tools.close()
        if self.guardrails is not None:
            await self.guardrails.close()
        for backend in self._backends():
            await backend.close()
        await self.knowledge.close()
        if self.recall is not None:
            await self.recall.close()
        await self.encoders.close()
        await self.background.close()
        await self.quotas.close()
        await self.workers.close()
        if self.accounts is not None:
            await self.accounts.close()
        if self.request_log is not None:
            await self.request_log.close()
        await self.tracing.close()
        if self.database is not None:
            await self.database.close()
        self.tokenization.close()
        self.grammars.close()

    async def _open_tools(self) -> ToolRegistry:
        """Tools that this gateway runs; without servers and a store it offers none."""
        settings, store = self.settings, None
        if self.database is not None:
            store = ToolSpecStore(self.database)
            await store.prepare()
        return ToolRegistry(
            settings.tool_servers, store, networks=settings.tools.networks, fresh_s=settings.key_fresh_s
        )

    def _recall(self) -> Recall | None:
        """The response caches, if there are any."""
        config = self.settings.cache
        if config.exact == config.semantic == "off":
            return None
        encoder = None
        if config.semantic != "off":
            encoder = self.encoders.find(config.encoder) if config.encoder else self.encoders.default
        return Recall(config, open_store(config), encoder, CacheMetrics(self.metrics.registry))

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        self.background.start(work)

    def record(self, record: RequestRecord) -> None:
        if self.request_log is not None:
            self.request_log.add(record)

    def cache_salt(self, caller: Caller) -> str:
        """What keeps tenants out of each other's cached prefixes; callers without a key share one."""
        return "" if self.settings.share_prefixes or not caller.key else caller.tenant

    async def drain_requests(self, seconds: float) -> None:
        if self.batch_runner is not None:
            self.batch_runner.hold()
        await self.drain.run(seconds)

    def track(self, generation: Generation) -> None:
        self.drain.track(generation)

    def untrack(self, generation: Generation) -> None:
        self.drain.untrack(generation)

    async def encode(self, model: ServedModel, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return await self.tokenization.encode(model, text, add_special_tokens=add_special_tokens)

    async def encode_chat(
        self,
        model: ServedModel,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        return await self.tokenization.encode_chat(
            model, messages, tools=tools, add_generation_prompt=add_generation_prompt
        )

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.tokenization.run(function, *args, **kwargs)

    def _backends(self) -> Iterator[Backend]:
        return (model.backend for model in self.registry)

    def _views(self) -> Iterator[EngineView]:
        for model in self.registry:
            for backend in model.backend.replicas:
                awake = backend.state in ("awake", "drowsy")
                yield EngineView(
                    model.name, backend.name, backend.ready, backend.info, backend.load, awake, model.cost_per_hour
                )


def open_sessions(config: ConversationsConfig, database: Database | None) -> Sessions | None:
    """The conversations as the configuration asks for them; None when none are kept."""
    store: ConversationStore
    if config.url and config.url != "off":
        if not config.url.startswith(("redis://", "rediss://", "unix://")):
            raise ConfigError(f"conversations.url: {redacted(config.url)} is not Redis; use redis://HOST:PORT or off")
        from penstock.conversations.redis import RedisConversations

        store = RedisConversations(config.url, ttl_s=config.ttl_s, most=config.per_user)
    elif not config.url and database is not None:
        store = SqlConversations(database, ttl_s=config.ttl_s, most=config.per_user)
    else:
        return None
    return Sessions(store, wait_s=config.wait_s, most_bytes=config.max_bytes)


def worker_group(
    settings: GatewaySettings, metrics: Metrics, tracing: RequestTracing, refresh_keys: Callable[[], None]
) -> WorkerGroup:
    worker = settings.worker
    if worker is None:
        return SingleWorker(metrics, tracing.recent, refresh_keys)
    return CoordinatedWorker(worker.coordinator, worker.number, metrics, tracing.recent, refresh_keys)


def _counters(config: CountersConfig, local: LimitStore) -> LimitStore:
    if not config.url:
        return local
    from penstock.limits.redis import RedisLimits

    return RedisLimits(config.url, fallback=config.fallback, local=local)
