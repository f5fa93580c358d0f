"""The settings of a gateway process, derived from the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.config.audit import AuditConfig
from penstock.config.autoscale import AutoscaleConfig
from penstock.config.batches import BatchesConfig
from penstock.config.cache import CacheConfig
from penstock.config.context import ConversationsConfig, JudgeConfig, ToolsConfig, ToolServerConfig
from penstock.config.encoders import EncoderConfig
from penstock.config.experiments import ExperimentConfig
from penstock.config.guardrails import GuardrailConfig
from penstock.config.input_files import InputFilesConfig
from penstock.config.knowledge import KnowledgeConfig
from penstock.config.models import ModelConfig
from penstock.config.pools import PoolConfig, PoolRuleConfig
from penstock.config.remotes import RemoteConfig
from penstock.config.routing import AdmissionConfig, RouteConfig, RoutingConfig
from penstock.config.sampling import SamplingConfig
from penstock.config.schema import (
    LAST_CLASS,
    Config,
    CountersConfig,
    LimitConfig,
    PriceConfig,
    RequestLogConfig,
    ResilienceConfig,
    TelemetryConfig,
    TierConfig,
)
from penstock.config.watermark import WatermarkConfig
from penstock.config.webhooks import WebhooksConfig
from penstock.gateway.accounting.request_limits import RequestLimits
from penstock.gateway.generation.settings import GenerationSettings
from penstock.metering.prices import Price, PriceBook, PriceEntry
from penstock.routing.breaker import BreakerPolicy
from penstock.routing.dispatch import Resilience
from penstock.routing.handover import HandoverPolicy
from penstock.routing.hold import HoldLimits
from penstock.telemetry.logging import LogFormat


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One model as clients see it."""

    name: str
    source: str
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    """Names of its configured LoRA adapters."""
    adapter_owners: tuple[tuple[str, str], ...] = ()
    """Those that belong to a tenant, each with it."""
    adapter_sources: tuple[tuple[str, str], ...] = ()
    """Where each of them is."""
    time_slice: str = ""
    """The time-slice group: its models take turns on the device."""
    input_price: float = 0.0
    """Dollars per million prompt tokens."""
    output_price: float = 0.0
    cost_per_hour: float = 0.0
    """Dollars per hour that the hardware of one engine costs."""
    autoscale: AutoscaleConfig | None = None
    tool_format: str = "auto"
    reasoning: str = "auto"
    thinking_budget: int | None = None
    sampling: SamplingConfig = SamplingConfig()  # noqa: RUF009
    """For requests that give no values."""
    downgrade_to: str = ""
    """The model that answers best-effort callers while this one is saturated."""
    fallback: tuple[str, ...] = ()
    overflow_at: int | None = None
    max_in_flight: int = 4096
    """The most requests running or waiting in its engine; further ones are refused."""
    silence_s: float = 75.0
    """An engine that is silent for this long is considered dead; longer than its own watchdog."""
    handover: HandoverPolicy = HandoverPolicy()  # noqa: RUF009
    autoscaled: bool = False
    hold: HoldLimits | None = None
    """Set for a model that is scaled to zero while idle."""
    pools: tuple[PoolConfig, ...] = ()
    pool_rules: tuple[PoolRuleConfig, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    """For data rules."""

    @classmethod
    def of(cls, model: ModelConfig) -> ModelSettings:
        return cls(
            name=model.name,
            source=model.source,
            aliases=model.aliases,
            adapters=tuple(spec.name for spec in model.adapters),
            adapter_owners=tuple((spec.name, spec.owner) for spec in model.adapters if spec.owner),
            adapter_sources=tuple((spec.name, spec.source) for spec in model.adapters),
            time_slice=model.time_slice,
            silence_s=model.watchdog_s + 15.0,
            input_price=model.input_price,
            output_price=model.output_price,
            cost_per_hour=model.cost_per_hour,
            autoscale=model.autoscale,
            tool_format=model.tool_format,
            reasoning=model.reasoning,
            thinking_budget=model.thinking_budget,
            sampling=model.sampling or SamplingConfig(),
            downgrade_to=model.downgrade_to,
            fallback=model.fallback,
            overflow_at=model.overflow_at,
            max_in_flight=max(_in_flight(model.in_pool(pool.name)) for pool in model.pools)
            if model.pools
            else _in_flight(model),
            handover=HandoverPolicy(model.handover_tokens, model.handover_wait_s),
            autoscaled=model.autoscale is not None,
            hold=None
            if model.autoscale is None or model.autoscale.min > 0
            else HoldLimits(model.autoscale.hold_s, model.autoscale.hold),
            pools=model.pools,
            pool_rules=model.pool_rules,
            labels=model.labels,
        )

    @property
    def price(self) -> PriceEntry:
        return PriceEntry(Price.per_million(self.input_price, self.output_price), model=self.name)


def _in_flight(model: ModelConfig) -> int:
    return model.max_waiting + (model.max_running or 0)


@dataclass(frozen=True, slots=True)
class Worker:
    """One of several gateway processes that share a port."""

    number: int
    coordinator: Path
    """The socket of the supervisor's worker coordinator."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    models: tuple[ModelSettings, ...]
    encoders: tuple[EncoderConfig, ...] = ()
    worker: Worker | None = None
    """None: this is the only process on the port."""
    shares_engines: bool = False
    """Other gateways send requests to the same engines."""
    host: str = "127.0.0.1"
    port: int = 8000
    body_limit: int = 4 * 2**20
    body_memory: int = 256 * 2**20
    body_disk: int = 4 * 2**30
    header_limit: int = 64 * 2**10
    receive_s: float = 30.0
    """How long the headers, and then the body, may take to arrive."""
    refuses_unknown: bool = False
    """Refuse parameters that are not honoured, instead of ignoring and naming them."""
    max_connections: int | None = None
    connections_per_address: int | None = None
    cors_origins: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    """Names besides the loopback ones under which a server without keys answers."""
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    """The port of /v1/admin; None: the same port as everything else."""
    drain_s: float = 30.0
    drain_delay_s: float = 0.0
    keep_alive_s: float = 10.0
    """A silent stream sends a comment at this interval."""
    hold_status_s: float = 15.0
    """How long the status line waits for the first token."""
    engine_wait_s: float = 10.0
    """How long a request waits for an engine that is not up."""
    time_slice_s: float = 10.0
    """How long a model of a time-slice group stays awake at least."""
    stalled_reader_s: float = 60.0
    """A client that reads nothing for this long is considered disconnected."""
    default_max_tokens: int | None = None
    max_tokens: int | None = None
    time_limit_s: float | None = None
    max_choices: int = 128
    store_url: str | None = None
    """The database of tenants and keys; None: there is none, and no key is needed."""
    durable_charges: bool = False
    """Every charge is synced to disk before it counts as written."""
    keep_responses_s: float = 30 * 86400.0
    responses_per_tenant: int = 10_000
    background_per_tenant: int = 64
    gateway_timeout_s: float = 20.0
    """A gateway without a sign of life for this long is considered dead."""
    ledger_wait_s: float = 5.0
    default_tier: str = ""
    key_fresh_s: float = 5.0
    key_grace_s: float = 3600.0
    share_prefixes: bool = False
    request_templates: bool = False
    """Whether requests may bring a chat template."""
    tiers: tuple[TierConfig, ...] = ()
    limits: tuple[LimitConfig, ...] = ()
    counters: CountersConfig = CountersConfig()  # noqa: RUF009
    routing: RoutingConfig = RoutingConfig()  # noqa: RUF009
    region: str = ""
    """Of this gateway."""
    routes: tuple[RouteConfig, ...] = ()
    experiments: tuple[ExperimentConfig, ...] = ()
    resilience: ResilienceConfig = ResilienceConfig()  # noqa: RUF009
    admission: AdmissionConfig = AdmissionConfig()  # noqa: RUF009
    remotes: tuple[RemoteConfig, ...] = ()
    prices: tuple[PriceConfig, ...] = ()
    guardrails: tuple[GuardrailConfig, ...] = ()
    conversations: ConversationsConfig = ConversationsConfig()  # noqa: RUF009
    tools: ToolsConfig = ToolsConfig()  # noqa: RUF009
    webhooks: WebhooksConfig = WebhooksConfig()  # noqa: RUF009
    input_files: InputFilesConfig = InputFilesConfig()  # noqa: RUF009
    tool_servers: tuple[ToolServerConfig, ...] = ()
    knowledge: KnowledgeConfig = KnowledgeConfig()  # noqa: RUF009
    judge: JudgeConfig = JudgeConfig()  # noqa: RUF009
    watermark: WatermarkConfig = WatermarkConfig()  # noqa: RUF009
    request_log: RequestLogConfig = RequestLogConfig()  # noqa: RUF009
    audit: AuditConfig = AuditConfig()  # noqa: RUF009
    cache: CacheConfig = CacheConfig()  # noqa: RUF009
    telemetry: TelemetryConfig = TelemetryConfig()  # noqa: RUF009
    batches: BatchesConfig = BatchesConfig()  # noqa: RUF009
    log_format: LogFormat = "text"
    log_level: str = "info"

    @property
    def generation(self) -> GenerationSettings:
        return GenerationSettings(
            body_limit=self.body_limit,
            max_tokens=self.max_tokens,
            default_max_tokens=self.default_max_tokens,
            max_choices=self.max_choices,
            time_limit_s=self.time_limit_s,
            batch_time_limit_s=self.batches.time_limit_s,
            engine_wait_s=self.engine_wait_s,
            hold_status_s=self.hold_status_s,
            keep_alive_s=self.keep_alive_s,
            share_prefixes=self.share_prefixes,
            request_templates=self.request_templates,
            record_text=self.telemetry.record_text,
            request_limits=RequestLimits(self.tiers, self.limits),
        )

    def price_book(self) -> PriceBook:
        """The configured prices; a model's own price applies where no entry matches."""
        own = [model.price for model in self.models]
        own += [
            PriceEntry(Price.per_million(remote.input_price, remote.output_price), model=remote.name)
            for remote in self.remotes
        ]
        own += [
            PriceEntry(Price.per_million(encoder.input_price, 0.0), model=encoder.name) for encoder in self.encoders
        ]
        listed = [
            PriceEntry(
                Price.per_million(entry.input_price, entry.output_price, entry.cached_price, entry.batch_percent),
                model=entry.model, adapter=entry.adapter, tier=entry.tier,
            )
            for entry in self.prices
        ]  # fmt: skip
        last = [tier.name for tier in self.tiers if tier.priority == LAST_CLASS]
        return PriceBook([*listed, *own], batch_tiers=last)

    def how_resilient(self) -> Resilience:
        """How a model's replicas handle failures."""
        config = self.resilience
        return Resilience(
            attempts=config.attempts,
            stall_s=config.stall_s,
            park_s=self.engine_wait_s,
            resume_s=config.resume_s,
            retry_share=config.retry_share,
            hedge_s=config.hedge_s,
            breaker=BreakerPolicy(failures=config.breaker_failures, open_s=config.breaker_open_s),
        )

    @classmethod
    def from_config(cls, config: Config, worker: Worker | None = None) -> GatewaySettings:
        server, generation = config.server, config.generation
        return cls(
            worker=worker,
            models=tuple(map(ModelSettings.of, config.models)),
            encoders=config.encoders,
            host=server.host,
            port=server.port,
            body_limit=server.body_limit,
            body_memory=server.body_memory,
            body_disk=server.body_disk,
            header_limit=server.header_limit,
            receive_s=server.receive_s,
            refuses_unknown=server.unknown_parameters == "refuse",
            stalled_reader_s=server.stalled_reader_s,
            max_connections=server.max_connections,
            connections_per_address=server.connections_per_address,
            cors_origins=server.cors_origins,
            trusted_hosts=server.trusted_hosts,
            admin_host=server.admin_host,
            admin_port=server.admin_port,
            drain_s=server.drain_s,
            drain_delay_s=server.drain_delay_s,
            keep_alive_s=server.keep_alive_s,
            engine_wait_s=server.engine_wait_s,
            time_slice_s=server.time_slice_s,
            default_max_tokens=generation.default_max_tokens,
            max_tokens=generation.max_tokens,
            time_limit_s=generation.time_limit_s,
            max_choices=generation.max_choices,
            store_url=config.store.url,
            durable_charges=config.store.durability == "machine",
            keep_responses_s=config.store.keep_responses_s,
            responses_per_tenant=config.store.responses_per_tenant,
            background_per_tenant=config.store.background_per_tenant,
            gateway_timeout_s=config.store.gateway_timeout_s,
            ledger_wait_s=config.store.wait_s,
            default_tier=config.auth.default_tier,
            key_fresh_s=config.auth.fresh_s,
            key_grace_s=config.auth.grace_s,
            share_prefixes=config.auth.share_prefixes,
            request_templates=generation.request_chat_templates,
            tiers=config.tiers,
            limits=config.limits,
            counters=config.counters,
            region=config.fleet.region,
            routing=config.routing,
            routes=config.routes,
            experiments=config.experiments,
            resilience=config.resilience,
            admission=config.admission,
            remotes=config.remotes,
            prices=config.prices,
            guardrails=config.guardrails,
            conversations=config.conversations,
            tools=config.tools,
            webhooks=config.webhooks,
            input_files=config.input_files,
            tool_servers=config.tool_servers,
            knowledge=config.knowledge,
            judge=config.judge,
            watermark=config.watermark,
            request_log=config.request_log,
            audit=config.audit,
            cache=config.cache,
            telemetry=config.telemetry,
            batches=config.batches,
            log_format=config.logging.format,
            log_level=config.logging.level,
        )
