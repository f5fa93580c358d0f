"""Every setting there is: its type, default, range and explanation, in one place.

Validation, `penstock config` and the example file are all derived from these dataclasses, so a key cannot exist
without being documented.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from penstock.config.batches import BatchesConfig
from penstock.config.cache import CacheConfig
from penstock.config.context import ConversationsConfig, JudgeConfig, ToolsConfig, ToolServerConfig
from penstock.config.encoders import DEFAULT_ENCODER, EncoderConfig
from penstock.config.fields import setting
from penstock.config.guardrails import GuardrailConfig
from penstock.config.knowledge import KnowledgeConfig
from penstock.config.models import DEFAULT_MODEL, ModelConfig
from penstock.config.remotes import RemoteConfig
from penstock.config.routing import AdmissionConfig, RouteConfig, RoutingConfig


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP side."""

    host: str = setting("127.0.0.1", doc="Address to listen on; 0.0.0.0 listens on all of them.")
    port: int = setting(8000, doc="Port to listen on.", least=1, most=65535)
    workers: int = setting(
        1, doc="Gateway processes that share the port; more than one where a single core is not enough.",
        least=1, most=256,
    )  # fmt: skip
    body_limit: int = setting(
        4 * 2**20, doc="Largest request body; a larger one gets 413.", least=1024, size=True, example="4MiB"
    )
    header_limit: int = setting(
        64 * 2**10, doc="Largest request line and headers together; larger ones get 431.", least=8192, most=2**20,
        size=True, example="64KiB",
    )  # fmt: skip
    receive_s: float = setting(
        30.0, doc="Seconds that headers, then the body, may take to arrive, and that a connection may idle.",
        least=0.1, most=3600,
    )  # fmt: skip
    cors_origins: tuple[str, ...] = setting(
        (), doc="Origins whose web pages may use this API from a browser; * for all of them.",
        example="['https://app.example.com']",
    )  # fmt: skip
    admin_port: int | None = setting(
        None, doc="Port of its own for /v1/admin, which is then answered there only.", least=1, most=65535,
        example="8001",
    )  # fmt: skip
    admin_host: str = setting("127.0.0.1", doc="Address to listen on for admin_port.")
    console: bool = setting(True, doc="Serve the web console at /console/ (with admin_port: there).")
    drain_s: float = setting(
        30.0, doc="On SIGTERM: seconds that running requests may still take before they are cut.", least=0
    )
    engine_wait_s: float = setting(
        10.0, doc="Seconds a request waits for an engine that is starting or restarting before it gets 503.", least=0
    )
    time_slice_s: float = setting(
        10.0, doc="Seconds that a model which takes turns (time_slice) stays awake at least.", least=0
    )
    loaded_models: str = setting(
        "", doc="File that keeps the models loaded while the server runs, so that the next start serves them too; they "
        "are forgotten when empty.", example="/var/lib/penstock/models.json",
    )  # fmt: skip
    keep_alive_s: float = setting(
        15.0, doc="A stream with nothing to say sends a comment line this often, in seconds.", least=0.1
    )


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Limits and defaults of one request."""

    default_max_tokens: int | None = setting(
        None, doc="Completion tokens when a chat request names no limit; the rest of the context when not set.",
        least=1, example="1024",
    )  # fmt: skip
    max_tokens: int | None = setting(
        None, doc="Most completion tokens one request may ask for; the context window when not set.",
        least=1, example="4096",
    )  # fmt: skip
    time_limit_s: float | None = setting(
        30.0, doc="Seconds one request may generate before it ends with what it has; null for no limit.", least=0.1
    )
    max_choices: int = setting(16, doc="Most choices (n) and prompts one request may ask for.", least=1)


@dataclass(frozen=True, slots=True)
class TierConfig:
    """What the tenants of a tier may do. A limit that is not set does not exist."""

    name: str = setting("", doc="What tenants and prices call it.")
    priority: int = setting(
        1, doc="Class: 0 premium, goes first; 1 standard; 2 batch, last and at the price of batches.", least=0, most=2
    )
    weight: float = setting(
        1.0, doc="Share of each of its tenants beside others of its class, when they have to wait.", least=0.001
    )
    best_effort: bool = setting(False, doc="Whether models[N].downgrade_to may answer when too many wait.")
    requests_per_minute: int | None = setting(
        None, doc="Requests a tenant may begin in a minute.", least=1, example="600"
    )
    tokens_per_minute: int | None = setting(
        None, doc="Prompt and completion tokens of a tenant in a minute.", least=1, example="200000"
    )
    concurrent_requests: int | None = setting(
        None, doc="Requests of a tenant running at one time.", least=1, example="20"
    )
    context_tokens: int | None = setting(
        None, doc="Longest prompt and completion together; the model's window when not set.", least=1, example="32768"
    )
    daily_budget: float | None = setting(None, doc="Money a tenant may spend in a day (UTC).", least=0, example="10")
    monthly_budget: float | None = setting(
        None, doc="Money a tenant may spend in a calendar month (UTC).", least=0, example="200"
    )


LAST_CLASS = 2
"""The class of batches."""

DEFAULT_TIERS = (
    TierConfig(name="free", priority=1, weight=1.0, best_effort=True, requests_per_minute=60, tokens_per_minute=40_000,
               concurrent_requests=4, context_tokens=32_768),
    TierConfig(name="standard", priority=1, weight=2.0, context_tokens=131_072),
    TierConfig(name="enterprise", priority=0, weight=4.0, context_tokens=131_072),
    TierConfig(name="batch", priority=2),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where tenants, keys, accounts and responses are kept."""

    url: str = setting(
        "", doc="sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME; a file of this user when empty."
    )
    durability: Literal["process", "machine"] = setting(
        "process", doc="What charges survive. process: the end of any process, kill -9 too; a machine that loses power "
        "may lose the last 5 s. machine: that too, and every answer waits for the disk.",
    )  # fmt: skip
    wait_s: float = setting(
        5.0, doc="Seconds a request waits for the ledger to be written before it gets 503; new ones get it at once.",
        least=0.1,
    )  # fmt: skip
    keep_responses_s: float = setting(30 * 86400.0, doc="Seconds after which a stored response is forgotten.", least=1)
    responses_per_tenant: int = setting(
        10_000, doc="Stored responses a tenant has at most; the oldest go first. 0: none are stored.", least=0
    )
    gateway_timeout_s: float = setting(
        20.0, doc="Seconds without a sign of life after which another gateway takes over what one left behind.", least=1
    )


@dataclass(frozen=True, slots=True)
class AuthConfig:
    """API keys. Without any, everybody on this machine is let in, and nobody else."""

    default_tier: str = setting("standard", doc="Tier of tenants that name none, and of callers without keys.")
    fresh_s: float = setting(5.0, doc="Seconds until a change to a key or tenant is seen by every gateway.", least=0.1)
    grace_s: float = setting(3600.0, doc="Seconds that keys seen before keep working while the store is away.", least=0)
    share_prefixes: bool = setting(
        False, doc="Let tenants reuse each other's cached prompt prefixes; faster, and visible in response times."
    )


@dataclass(frozen=True, slots=True)
class LimitConfig:
    """A limit besides those of the tiers: per user, per key, per model, or for one tenant."""

    per: Literal["tenant", "user", "key", "model"] = setting("user", doc="Whose usage is counted together.")
    tier: str = setting("", doc="Only for callers of this tier.")
    tenant: str = setting("", doc="Only for this tenant.")
    model: str = setting("", doc="Only for this model.")
    requests_per_minute: int | None = setting(None, doc="Requests begun in a minute.", least=1, example="60")
    tokens_per_minute: int | None = setting(
        None, doc="Prompt and completion tokens in a minute.", least=1, example="20000"
    )
    concurrent_requests: int | None = setting(None, doc="Requests running at one time.", least=1, example="4")
    daily_budget: float | None = setting(None, doc="Money in a day (UTC).", least=0, example="1")
    monthly_budget: float | None = setting(None, doc="Money in a calendar month (UTC).", least=0, example="20")


@dataclass(frozen=True, slots=True)
class CountersConfig:
    """Where usage is counted against limits."""

    url: str = setting("", doc="redis://HOST:PORT, when several gateways share limits; this process when empty.")
    fallback: Literal["open", "closed"] = setting(
        "open", doc="While Redis is away: open lets each gateway count for itself, closed refuses requests."
    )


@dataclass(frozen=True, slots=True)
class ResilienceConfig:
    """What happens to requests whose replica dies, stalls or fails them."""

    attempts: int = setting(3, doc="Replicas that may fail under a request before it gets an error.", least=1)
    resume_s: float = setting(
        30.0, doc="A stream that has begun waits so long for an engine to go on with when none is up; then it breaks.",
        least=0,
    )  # fmt: skip
    stall_s: float = setting(
        15.0, doc="A replica with work that completes no step for this long is left; its requests go on elsewhere.",
        least=0.1,
    )  # fmt: skip
    frozen_s: float = setting(
        30.0, doc="An engine of this server that gives no sign of life for this long is killed and started again; "
        "0: never. One that is only stuck in a step ends itself, see models[N].watchdog_s.",
        least=0,
    )  # fmt: skip
    retry_share: float = setting(
        0.1, doc="Most retries and hedges, as a share of requests; moving on from a dead replica is free.",
        least=0, most=1,
    )  # fmt: skip
    hedge_s: float | None = setting(
        None, doc="A request without a token after this long is tried on a second replica too; never when not set.",
        least=0.001, example="2",
    )  # fmt: skip
    breaker_failures: int = setting(
        3, doc="Failures within 30 s, half of all, after which a replica gets nothing for a while.", least=1
    )
    breaker_open_s: float = setting(
        2.0, doc="How long that is; twice as long each time in a row, at most a minute.", least=0.01
    )


@dataclass(frozen=True, slots=True)
class PriceConfig:
    """What tokens cost, where that differs from the model's own prices; the most specific entry applies."""

    model: str = setting("", doc="The model it is for; any when empty.")
    adapter: str = setting("", doc="The adapter it is for; any when empty.")
    tier: str = setting("", doc="The tier it is for; any when empty.")
    input_price: float = setting(0.0, doc="Price of a million prompt tokens.", least=0)
    cached_price: float | None = setting(
        None, doc="Price of a million prompt tokens found in the cache; half of input_price when not set.", least=0,
        example="0.05",
    )  # fmt: skip
    output_price: float = setting(0.0, doc="Price of a million completion tokens.", least=0)
    batch_percent: int = setting(
        50, doc="How much of these prices batches pay, and tiers of the last class.", least=0, most=100
    )


@dataclass(frozen=True, slots=True)
class RequestLogConfig:
    """One record per request: who, which model, how many tokens, how long. Never its text."""

    url: str = setting(
        "", doc="sqlite:, postgresql:, kafka://HOST:PORT/TOPIC or clickhouse://HOST:PORT/DATABASE; the store when "
        "empty; off for none.", off=True,
    )  # fmt: skip
    retention_days: float | None = setting(30.0, doc="Days that records are kept; null for ever.", least=0.01)
    batch: int = setting(500, doc="Most records written together.", least=1, most=10_000)
    flush_s: float = setting(1.0, doc="Seconds a record waits for others to be written with.", least=0.01)
    spool: str = setting(
        "", doc="Folder for records while the sink is away; beside the SQLite store, or this user's, when empty."
    )
    spool_limit: int = setting(
        256 * 2**20, doc="Most bytes in the folder per gateway; further records are lost, and counted.", least=0,
        size=True,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoggingConfig:
    """What is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = setting("info", doc="Least important level shown.")
    format: Literal["text", "json"] = setting("text", doc="Lines for people, or one JSON object per line.")


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """What is measured and traced."""

    most_series: int = setting(
        1000, doc="Combinations of tenant, model, adapter and feature with metrics of their own; then `other`.", least=1
    )
    recent_requests: int = setting(
        1000, doc="Requests whose timelines are kept in memory for `penstock trace`.", least=0, most=1_000_000
    )
    slow_request_s: float | None = setting(
        60.0, doc="A request that takes longer is logged with the time of each phase; null for none.", least=0
    )
    slow_ttft_s: float | None = setting(3.0, doc="The same for the time to its first token.", least=0)
    record_text: bool = setting(False, doc="Write prompts and answers into logs and traces. Think of whose they are.")
    otlp_endpoint: str = setting(
        "", doc="Where OpenTelemetry spans go, as OTLP over HTTP (http://HOST:4318); none when empty."
    )
    otlp_headers: tuple[str, ...] = setting((), doc="Headers for it, as NAME=VALUE.", example="[x-token=SECRET]")
    otlp_metrics_s: float | None = setting(
        None, doc="Seconds between pushes of latencies and tokens to otlp_endpoint; null: they are only scraped.",
        least=0.01, example="15",
    )  # fmt: skip
    trace_share: float = setting(
        1.0, doc="Part of the requests that are traced when the caller does not say (traceparent).", least=0, most=1
    )
    service_name: str = setting("penstock", doc="What traces call this server.")


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration, complete and checked."""

    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    models: tuple[ModelConfig, ...] = (ModelConfig(name=DEFAULT_MODEL),)
    encoders: tuple[EncoderConfig, ...] = (EncoderConfig(name=DEFAULT_ENCODER),)
    remotes: tuple[RemoteConfig, ...] = ()
    generation: GenerationConfig = dataclasses.field(default_factory=GenerationConfig)
    store: StoreConfig = dataclasses.field(default_factory=StoreConfig)
    auth: AuthConfig = dataclasses.field(default_factory=AuthConfig)
    tiers: tuple[TierConfig, ...] = DEFAULT_TIERS
    limits: tuple[LimitConfig, ...] = ()
    counters: CountersConfig = dataclasses.field(default_factory=CountersConfig)
    routing: RoutingConfig = dataclasses.field(default_factory=RoutingConfig)
    routes: tuple[RouteConfig, ...] = ()
    resilience: ResilienceConfig = dataclasses.field(default_factory=ResilienceConfig)
    admission: AdmissionConfig = dataclasses.field(default_factory=AdmissionConfig)
    prices: tuple[PriceConfig, ...] = ()
    guardrails: tuple[GuardrailConfig, ...] = ()
    conversations: ConversationsConfig = dataclasses.field(default_factory=ConversationsConfig)
    tools: ToolsConfig = dataclasses.field(default_factory=ToolsConfig)
    tool_servers: tuple[ToolServerConfig, ...] = ()
    knowledge: KnowledgeConfig = dataclasses.field(default_factory=KnowledgeConfig)
    judge: JudgeConfig = dataclasses.field(default_factory=JudgeConfig)
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    request_log: RequestLogConfig = dataclasses.field(default_factory=RequestLogConfig)
    telemetry: TelemetryConfig = dataclasses.field(default_factory=TelemetryConfig)
    batches: BatchesConfig = dataclasses.field(default_factory=BatchesConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
