"""Starts the parts of a gateway, which `endpoints` then makes its endpoints of.

`compose` is one list. Read forwards it is the order of the start, read backwards the order of the stop: everything that
is started registers its `close`, also when a later part fails to start.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from penstock.gateway.accounting.admission import Admissions
from penstock.gateway.accounting.charges import Accounts, NoAccounts
from penstock.gateway.accounting.encoder_work import EncoderWork
from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.api.admin.supervisor import NoSupervisor, Supervisor
from penstock.gateway.api.openai.responses.background import BackgroundResponses
from penstock.gateway.api.openai.responses.store import NoResponseStore, ResponseStore
from penstock.gateway.api.operations.health import Check
from penstock.gateway.app.background import BackgroundTasks
from penstock.gateway.app.bodies import Bodies
from penstock.gateway.app.drain import Drain
from penstock.gateway.app.tracing import RequestTracing
from penstock.gateway.batches.runner import BatchRunner
from penstock.gateway.conversations.turn import StatelessConversations, StoredConversations
from penstock.gateway.generation.constraints import ModelConstraints
from penstock.gateway.generation.experiments import Experiments
from penstock.gateway.generation.file_texts import FileTexts
from penstock.gateway.generation.file_urls import FileUrls
from penstock.gateway.generation.input_files import InputFiles
from penstock.gateway.generation.lifecycle import GenerationLifecycle
from penstock.gateway.generation.model_routes import Routes
from penstock.gateway.generation.permissions import Permissions
from penstock.gateway.generation.pipeline import GenerationPipeline
from penstock.gateway.generation.remote_streams import RemoteStreams
from penstock.gateway.generation.response_format import GrammarCache
from penstock.gateway.generation.shadows import Shadows
from penstock.gateway.generation.tokenization import Tokenization
from penstock.gateway.generation.watermarks import Watermarks
from penstock.gateway.moderation.guardrails import Guardrails
from penstock.gateway.moderation.moderators import ModerationBackends
from penstock.gateway.process import implementations
from penstock.gateway.process.encoder_follower import EncoderFollower
from penstock.gateway.process.engine_views import engine_views, without_replica
from penstock.gateway.process.gateway import Gateway
from penstock.gateway.process.load_reporter import LoadReporter
from penstock.gateway.process.model_follower import ModelFollower, curve_of
from penstock.gateway.process.request_log import charge_entry, open_request_log
from penstock.gateway.process.settings import GatewaySettings
from penstock.gateway.process.stores import open_stores
from penstock.gateway.process.supervisor_link import Follow, Link, Scaled, SupervisorLink
from penstock.gateway.quality.judge import Judge, NoJudge
from penstock.gateway.rag.library import KnowledgeLibrary
from penstock.gateway.rag.retrieval import CollectionSearch
from penstock.gateway.server_tools.answers import NoServerTools, ServerTools, ToolAnswers
from penstock.gateway.webhooks.delivery import WebhookClient, WebhookDeliveries
from penstock.identity.data_rules import DataRules
from penstock.metering.audit import AuditLog
from penstock.metering.log_entries import CHARGES
from penstock.protocol.fleet_secret import FleetSecret
from penstock.routing.encoders import Encoders
from penstock.routing.registry import ModelRegistry
from penstock.routing.replica_metrics import add_replica_metrics
from penstock.routing.time_slice_groups import TimeSlices
from penstock.storage import open_database
from penstock.storage.watch import DatabaseWatch
from penstock.telemetry.autoscale_metrics import add_autoscale_metrics
from penstock.telemetry.encoder_metrics import EncoderMetrics
from penstock.telemetry.experiment_metrics import ExperimentMetrics
from penstock.telemetry.fleet_metrics import add_fleet_metrics
from penstock.telemetry.knowledge_metrics import KnowledgeMetrics
from penstock.telemetry.metrics import Metrics
from penstock.telemetry.route_metrics import RouteMetrics
from penstock.text.fair_threads import FairThreads
from penstock.tools.execution import ToolRegistry


@asynccontextmanager
async def compose(
    settings: GatewaySettings,
    registry: ModelRegistry,
    encoders: Encoders,
    supervisor_socket: Path | None = None,
    secret: FleetSecret | None = None,
    fleet: Callable[[Follow, Scaled], Link] | None = None,
) -> AsyncIterator[Gateway]:
    """A gateway that is started on entry and closed on exit. `secret`: for engines on other machines; `fleet`: makes
    the link to a fleet, which says which engines there are where there is no supervisor."""
    async with AsyncExitStack() as stack:
        closing = stack.push_async_callback

        # What everything else uses.
        metrics = Metrics(partial(engine_views, registry), settings.telemetry.most_series)
        add_replica_metrics(metrics.registry, registry)
        drain = Drain()
        drain.on_begin(partial(metrics.draining.set, 1))
        grammars = GrammarCache(metrics)
        stack.callback(grammars.close)
        text_threads = FairThreads()
        stack.callback(text_threads.close)
        tokenization = Tokenization(text_threads)
        database, stores = None, None
        checks: dict[str, Check] = {}
        if settings.store_url is not None:
            database = await open_database(settings.store_url)
            closing(database.close)
            stores = await open_stores(database, settings, metrics.registry)
            watch = DatabaseWatch(database)
            watch.start()
            closing(watch.close)
            checks["store"] = watch.check
        tracing = RequestTracing(settings.telemetry, metrics)
        closing(tracing.close)
        audit = None
        if stores is not None and settings.audit.enabled:
            audit = AuditLog(stores.audit, metrics.registry)
            audit.start()
            closing(audit.close)
        request_log = open_request_log(settings, database, metrics)
        request_log.start()
        closing(request_log.close)

        # Who may use how much, and what it costs.
        prices = settings.price_book()
        accounts: Accounts | NoAccounts = NoAccounts()
        if stores is not None:
            accounts = Accounts(
                stores.ledger,
                prices,
                registry,
                metrics.usage,
                dead_after_s=settings.gateway_timeout_s,
                patience_s=settings.ledger_wait_s,
                announce=(lambda one: request_log.put(charge_entry(one))) if request_log.takes(CHARGES) else None,
            )
            stores.feedback.announce = request_log.put
            await accounts.start()
            closing(accounts.close)
        authentication = implementations.authentication(settings, stores)
        workers = implementations.worker_group(settings, metrics, tracing, authentication.refresh)
        await workers.start()
        closing(workers.close)
        counters = implementations.limit_counters(settings.counters, workers.limits)
        quotas = Quotas(counters, settings.tiers, settings.limits, prices)
        closing(quotas.close)
        watermarks = Watermarks(settings.watermark, {tier.name: tier.watermark for tier in settings.tiers})
        background = BackgroundTasks()
        closing(background.close)
        checks |= {"ledger": accounts.problem, "limits": quotas.problem}

        # What answers.
        permissions = Permissions(registry, encoders)
        for embedder in encoders:
            embedder.threads = text_threads
        closing(encoders.close)
        cache = implementations.response_cache(settings.cache, encoders, metrics)
        closing(cache.close)

        async def forget_answers(model: str) -> None:
            """The name now means another model, or none."""
            await cache.evict(model=model)

        knowledge = KnowledgeLibrary(
            settings.knowledge, settings.store_url, encoders, KnowledgeMetrics(metrics.registry)
        )
        await knowledge.start(database)
        closing(knowledge.close)
        closing(_close_engines, registry)
        for model in registry:
            await model.backend.start()
        moderators = ModerationBackends(registry, tokenization, grammars, accounts, settings.generation)
        guardrails = Guardrails(settings.guardrails, metrics, moderators, permissions)
        closing(guardrails.close)
        checks["guardrails"] = guardrails.problem
        tools = ToolRegistry(
            settings.tool_servers,
            None if stores is None else stores.tools,
            networks=settings.tools.networks,
            fresh_s=settings.key_fresh_s,
        )
        closing(tools.close)
        judge: Judge | NoJudge = NoJudge()
        if settings.judge.rate or any(experiment.judge for experiment in settings.experiments):
            judge = Judge(
                settings.judge,
                settings.generation,
                registry,
                permissions,
                tokenization,
                grammars,
                metrics.context,
                announce=request_log.put,
            )
            judge.start()
            closing(judge.close)
        sessions = implementations.conversation_sessions(settings.conversations, database)
        if sessions is not None:
            await sessions.start()
            closing(sessions.close)
        for remote in registry.remotes.values():
            await remote.start()
            closing(remote.close)
        downgrades = {model.name: model.downgrade_to for model in settings.models if model.downgrade_to}
        admissions = Admissions(settings.admission, settings.tiers, downgrades, registry, metrics)
        metrics.waiting.add(admissions.depths, "capacity", shared=bool(settings.admission.url))
        metrics.waiting.add(partial(without_replica, registry), "deferred")
        await admissions.start()
        closing(admissions.close)
        source_search = CollectionSearch(knowledge)
        constraints = ModelConstraints(registry, quotas, admissions, tokenization, source_search)
        routes = Routes(settings.routes, registry, encoders, RouteMetrics(metrics.registry), permissions, constraints)
        await routes.start(database)
        experiment_metrics = ExperimentMetrics(metrics.registry)
        experiments = Experiments(settings.experiments, registry, routes, prices, experiment_metrics, permissions)
        await experiments.start(database)
        closing(experiments.close)
        if stores is not None:
            stores.feedback.on_arm = experiments.voted
        if isinstance(judge, Judge):
            judge.on_arm = experiments.graded
        slices = TimeSlices(registry, settings.time_slice_s)
        slices.start()
        closing(slices.close)
        runner = None
        if stores is not None:
            runner = BatchRunner(
                stores.batches,
                stores.files,
                authentication.holder,
                lines_at_once=settings.batches.lines_at_once,
                most_lines=settings.batches.most_lines,
                lease_s=settings.gateway_timeout_s,
                metrics=metrics.registry,
            )
            drain.on_begin(runner.hold)
            closing(runner.close)
        supervisor: Supervisor = NoSupervisor()
        if supervisor_socket is not None or fleet is not None:
            follow_encoders = EncoderFollower(
                encoders,
                {encoder.name: encoder for encoder in settings.encoders},
                registry,
                lambda replica: curve_of(replica, secret),
                text_threads,
            ).follow
            follower = ModelFollower(
                settings, registry, admissions, prices, forget_answers, background, secret, follow_encoders
            )
            link: Link
            if supervisor_socket is not None:
                link = SupervisorLink(supervisor_socket, follower.follow, follower.scaled)
            else:
                assert fleet is not None
                link = fleet(follower.follow, follower.scaled)
                checks["fleet"] = link.problem
                drain.on_begin(link.draining)
            supervisor = link
            await link.start()
            closing(link.close)
            reporter = LoadReporter(registry, admissions, settings.admission.slots, link.report)
            reporter.start()
            closing(reporter.close)
        add_autoscale_metrics(metrics.registry, lambda: supervisor.scaling)
        add_fleet_metrics(metrics.registry, lambda: supervisor.fleet)

        streams = RemoteStreams()
        closing(streams.close)
        if isinstance(accounts, Accounts):
            accounts.streams = streams

        # The generation pipeline with its stages.
        lifecycle = GenerationLifecycle(
            quotas, admissions, accounts, drain, background, permissions, record_text=settings.generation.record_text
        )
        shadows = Shadows(
            settings.experiments, registry, permissions, admissions, accounts, judge, experiments, experiment_metrics
        )
        shadows.start()
        closing(shadows.close)
        pipeline = GenerationPipeline(
            settings.generation,
            registry=registry,
            permissions=permissions,
            watermarks=watermarks,
            routes=routes,
            experiments=experiments,
            shadows=shadows,
            slices=slices,
            admissions=admissions,
            quotas=quotas,
            lifecycle=lifecycle,
            tokenization=tokenization,
            grammars=grammars,
            metrics=metrics,
            background=background,
            content_filter=guardrails,
            source_search=source_search,
            cache=cache,
            grader=judge,
            streams=streams,
        )
        conversations: StoredConversations | StatelessConversations = StatelessConversations()
        if sessions is not None:
            conversations = StoredConversations(
                sessions, settings.conversations, settings.generation, lifecycle, tokenization, metrics
            )
        server_tools: ToolAnswers = NoServerTools()
        if settings.tool_servers or stores is not None:
            server_tools = ServerTools(pipeline, tools, settings.tools, request_log.add)
        responses = NoResponseStore() if stores is None else stores.responses
        detached = None
        if isinstance(responses, ResponseStore):
            detached = BackgroundResponses(
                responses.background,
                authentication.holder,
                most=settings.background_per_tenant,
                lease_s=settings.gateway_timeout_s,
                metrics=metrics.registry,
            )
            drain.on_begin(detached.hold)
            closing(detached.close)
        webhook_client = None
        if stores is not None and stores.webhooks is not None:
            webhook_client = WebhookClient(settings.webhooks)
            closing(webhook_client.close)
            deliveries = WebhookDeliveries(stores.webhooks, webhook_client, settings.webhooks, metrics.registry)
            deliveries.start()
            closing(deliveries.close)

        encoder_metrics = EncoderMetrics(metrics.registry, lambda: encoders)
        encoder_work = EncoderWork(encoders, quotas, accounts, encoder_metrics, background)
        urls = FileUrls(settings.input_files, metrics.registry)
        closing(urls.close)
        input_files = InputFiles(
            None if stores is None else stores.files,
            settings.body_limit,
            permissions=permissions,
            quotas=quotas,
            texts=FileTexts(settings.input_files.cache, metrics.registry),
            urls=urls,
        )
        closing(input_files.close)

        yield Gateway(
            settings=settings,
            metrics=metrics,
            tracing=tracing,
            drain=drain,
            background=background,
            checks=checks,
            bodies=Bodies(settings.body_memory, settings.body_disk),
            database=database,
            stores=stores,
            audit=audit,
            request_log=request_log,
            authentication=authentication,
            workers=workers,
            permissions=permissions,
            data_rules=DataRules({tier.name: tier.require for tier in settings.tiers}, settings.routing.regions),
            quotas=quotas,
            accounts=accounts,
            admissions=admissions,
            registry=registry,
            encoders=encoders,
            supervisor=supervisor,
            routes=routes,
            experiments=experiments,
            tokenization=tokenization,
            watermarks=watermarks,
            guardrails=guardrails,
            cache=cache,
            forget_answers=forget_answers,
            judge=judge,
            knowledge=knowledge,
            tools=tools,
            pipeline=pipeline,
            sessions=sessions,
            conversations=conversations,
            server_tools=server_tools,
            encoder_work=encoder_work,
            input_files=input_files,
            responses=responses,
            background_responses=detached,
            batch_runner=runner,
            webhook_client=webhook_client,
        )


async def _close_engines(registry: ModelRegistry) -> None:
    """Those that are served at the end, which may be others than at the start."""
    for model in registry:
        await model.backend.close()
