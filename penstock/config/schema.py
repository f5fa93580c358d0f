"""All settings: type, default, range and explanation, in one place.

Validation, `penstock config` and the example file are all derived from these dataclasses, so a key cannot exist
without being documented.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from penstock.config.access import AllowConfig
from penstock.config.audit import AuditConfig
from penstock.config.batches import BatchesConfig
from penstock.config.cache import CacheConfig
from penstock.config.cluster import ClusterConfig
from penstock.config.context import ConversationsConfig, JudgeConfig, ToolsConfig, ToolServerConfig
from penstock.config.encoders import DEFAULT_ENCODER, EncoderConfig
from penstock.config.experiments import ExperimentConfig
from penstock.config.fields import setting
from penstock.config.fleet import FleetConfig
from penstock.config.guardrails import GuardrailConfig
from penstock.config.input_files import InputFilesConfig
from penstock.config.knowledge import KnowledgeConfig
from penstock.config.log_pipeline import LogPipelineConfig
from penstock.config.models import DEFAULT_MODEL, ModelConfig
from penstock.config.remotes import RemoteConfig
from penstock.config.routing import AdmissionConfig, RouteConfig, RoutingConfig
from penstock.config.watermark import WatermarkConfig
from penstock.config.webhooks import WebhooksConfig


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP server."""

    host: str = setting("127.0.0.1", doc="Address to listen on; 0.0.0.0: all addresses.")
    port: int = setting(8000, doc="Port to listen on.", least=1, most=65535)
    workers: int = setting(
        1, doc="Gateway processes that share the port; use more than one if a single core is not enough.",
        least=1, most=256,
    )  # fmt: skip
    body_limit: int = setting(
        4 * 2**20, doc="Maximum size of a request body; larger ones get 413.", least=1024, size=True, example="4MiB"
    )
    body_memory: int = setting(
        256 * 2**20, doc="Memory of a gateway process for request bodies that are arriving; beyond it, they are "
        "written to the temporary folder (TMPDIR) until they are complete.", least=0, size=True, example="256MiB",
    )  # fmt: skip
    body_disk: int = setting(
        4 * 2**30, doc="Disk space in the temporary folder for request bodies that are arriving, of which one tenant "
        "may use a quarter; beyond it, large bodies get 503 (429 for the tenant).", least=2**20, size=True,
        example="4GiB",
    )  # fmt: skip
    header_limit: int = setting(
        64 * 2**10, doc="Maximum size of request line and headers; larger ones get 431.", least=8192, most=2**20,
        size=True, example="64KiB",
    )  # fmt: skip
    receive_s: float = setting(
        30.0, doc="Time limit in seconds for headers, for the body, and for an idle connection.",
        least=0.1, most=3600,
    )  # fmt: skip
    unknown_parameters: Literal["ignore", "refuse"] = setting(
        "ignore", doc="Request parameters that are not honoured and would not change the answer: ignore, named in the "
        "header x-penstock-ignored, or refuse with 400.",
    )  # fmt: skip
    stalled_reader_s: float = setting(
        60.0, doc="Seconds that a client may leave a full buffer of ours unread; then it counts as disconnected.",
        least=0.1, most=3600,
    )  # fmt: skip
    max_connections: int | None = setting(
        None, doc="Maximum connections of a gateway process; others get 503. null: as many as files may be open.",
        least=1, example="10000",
    )  # fmt: skip
    connections_per_address: int | None = setting(
        None, doc="Maximum connections from one address to a gateway process; others get 503. Leave it unset behind a "
        "proxy, which is one address. null: no limit.",
        least=1, example="200",
    )  # fmt: skip
    cors_origins: tuple[str, ...] = setting(
        (), doc="Origins whose web pages may use this API from a browser; *: all (while there is no key: those of "
        "this machine).", example="['https://app.example.com']",
    )  # fmt: skip
    trusted_hosts: tuple[str, ...] = setting(
        (), doc="Host names besides localhost under which a server without keys answers, such as that of a proxy; "
        "with keys any name will do.", example="[penstock.example.com]",
    )  # fmt: skip
    admin_port: int | None = setting(
        None, doc="Separate port for /v1/admin, which is then served only there.", least=1, most=65535,
        example="8001",
    )  # fmt: skip
    admin_host: str = setting("127.0.0.1", doc="Address to listen on for admin_port.")
    console: bool = setting(True, doc="Serve the web console at /console/ (on admin_port, if set).")
    max_engines: int = setting(
        64, doc="Maximum of engine processes, all models together; loading or scaling beyond it is refused.",
        least=1, most=256,
    )  # fmt: skip
    drain_s: float = setting(30.0, doc="On SIGTERM: seconds that running requests get to finish.", least=0)
    drain_delay_s: float = setting(
        0.0, doc="On SIGTERM: seconds before that in which the gateway is no longer ready, but still takes requests, "
        "so that a balancer notices first; a few times the interval of its health checks.", least=0,
    )  # fmt: skip
    engine_wait_s: float = setting(
        10.0, doc="Seconds a request waits for an engine that is starting or restarting before it gets 503.", least=0
    )
    time_slice_s: float = setting(10.0, doc="Minimum seconds that a model of a time_slice group stays awake.", least=0)
    loaded_models: str = setting(
        "", doc="File of the models loaded at run time, so that the next start serves them too; empty: they are "
        "not saved.", example="/var/lib/penstock/models.json",
    )  # fmt: skip
    keep_alive_s: float = setting(15.0, doc="Seconds between keep-alive comments on an idle stream.", least=0.1)


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Limits and defaults of one request."""

    default_max_tokens: int | None = setting(
        None, doc="Completion limit of chat requests without one; when not set, the rest of the context window.",
        least=1, example="1024",
    )  # fmt: skip
    max_tokens: int | None = setting(
        None, doc="Maximum completion tokens of a request; when not set, the context window.",
        least=1, example="4096",
    )  # fmt: skip
    time_limit_s: float | None = setting(
        None, doc="Time limit of every request in seconds; it then ends with what it has. Tiers may have lower ones; "
        "when not set, only those apply.", least=0.1, example="600",
    )  # fmt: skip
    max_choices: int = setting(
        128, doc="Maximum of choices (n, best_of) and prompts per request; 16 at a time run in the engine.", least=1
    )
    request_chat_templates: bool = setting(
        False, doc="Whether requests may bring their own chat_template. It runs in the sandbox of the model's own, but "
        "can put text in front of the model in ways that content filters do not recognise.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Limits and priority of the tenants of a tier. A limit that is not set does not apply."""

    name: str = setting("", doc="Name of the tier, used by tenants and prices.")
    priority: int = setting(
        1, doc="Class: 0 premium, goes first; 1 standard; 2 batch, last and at batch prices.", least=0, most=2
    )
    weight: float = setting(
        1.0, doc="Share of each tenant relative to others of its class, when requests queue.", least=0.001
    )
    require: tuple[tuple[str, str], ...] = setting(
        (), doc="Labels that whatever gets its requests' data must have: models, remotes, tools.", several=True,
        example="{region: [eu, ch], external: false}",
    )  # fmt: skip
    best_effort: bool = setting(False, doc="Whether models[N].downgrade_to may answer when the queue is long.")
    requests_per_minute: int | None = setting(None, doc="Requests per minute and tenant.", least=1, example="600")
    tokens_per_minute: int | None = setting(
        None, doc="Prompt and completion tokens per minute and tenant.", least=1, example="200000"
    )
    concurrent_requests: int | None = setting(None, doc="Concurrent requests per tenant.", least=1, example="20")
    context_tokens: int | None = setting(
        None,
        doc="Maximum of prompt and completion tokens together; when not set, the model's window.",
        least=1,
        example="32768",
    )
    time_limit_s: float | None = setting(
        None, doc="Time limit of a request in seconds; it then ends with what it has. Not for requests without a key.",
        least=0.1, example="600",
    )  # fmt: skip
    daily_budget: float | None = setting(None, doc="Dollars per tenant and day (UTC).", least=0, example="10")
    monthly_budget: float | None = setting(
        None, doc="Dollars per tenant and calendar month (UTC).", least=0, example="200"
    )
    output_tokens: int | None = setting(
        None, doc="Maximum completion tokens of an answer; a request for more is refused.", least=1, example="4096"
    )
    choices: int | None = setting(
        None, doc="Maximum of choices (n, best_of) and prompts per request.", least=1, example="4"
    )
    tools: int | None = setting(
        None, doc="Maximum of tools that a request offers to the model; 0: none.", least=0, example="32"
    )
    tool_rounds: int | None = setting(
        None, doc="Maximum of rounds of calls to tools that the gateway runs (server_tools); 0: none.", least=0,
        example="4",
    )  # fmt: skip
    watermark: Literal["never", "asked", "default", "always"] | None = setting(
        None, doc="Whether answers carry a watermark: never; where a request asks for it; unless a request declines; "
        "always. When not set, watermark.use decides.", example="default",
    )  # fmt: skip
    allow: AllowConfig | None = setting(  # noqa: RUF009
        None, doc="What its tenants may use; tenants and keys may have narrower lists. What is not allowed does not "
        "exist for them.", example="{models: [small, auto], remotes: []}",
    )  # fmt: skip


LAST_CLASS = 2
"""The class of batches."""

DEFAULT_TIERS = (
    TierConfig(name="free", priority=1, weight=1.0, best_effort=True, requests_per_minute=60, tokens_per_minute=40_000,
               concurrent_requests=4, context_tokens=32_768, time_limit_s=30.0),
    TierConfig(name="standard", priority=1, weight=2.0, context_tokens=131_072, time_limit_s=600.0),
    TierConfig(name="enterprise", priority=0, weight=4.0, context_tokens=131_072),
    TierConfig(name="batch", priority=2),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The database of tenants, keys, the ledger and stored responses."""

    url: str = setting("", doc="sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME; empty: a file of this user.")
    durability: Literal["process", "machine"] = setting(
        "process", doc="What charges survive. process: a crash of any process, even kill -9; a power failure "
        "may lose the last 5 s. machine: a power failure too, but every answer waits for the disk.",
    )  # fmt: skip
    wait_s: float = setting(
        5.0, doc="Seconds a request waits for the ledger before it gets 503; new requests then get it at once.",
        least=0.1,
    )  # fmt: skip
    keep_responses_s: float = setting(30 * 86400.0, doc="Seconds after which a stored response is deleted.", least=1)
    responses_per_tenant: int = setting(
        10_000, doc="Maximum of stored responses per tenant; the oldest are deleted first. 0: none are stored.", least=0
    )
    background_per_tenant: int = setting(
        64, doc="Maximum of responses with `background: true` of one tenant that wait or are generated at a time, in "
        "each gateway process. 0: none.", least=0,
    )  # fmt: skip
    gateway_timeout_s: float = setting(
        20.0, doc="Seconds without a heartbeat after which another gateway settles a gateway's open charges.", least=1
    )


@dataclass(frozen=True, slots=True)
class AuthConfig:
    """API keys. Until the first key is created, the server accepts requests from this machine only, without a key."""

    default_tier: str = setting("standard", doc="Tier of tenants without one, and of callers without a key.")
    fresh_s: float = setting(5.0, doc="Seconds until every gateway applies a change to a key or tenant.", least=0.1)
    grace_s: float = setting(
        3600.0, doc="Seconds that known keys keep working while the store is unavailable.", least=0
    )
    share_prefixes: bool = setting(
        False, doc="Let tenants share cached prompt prefixes; faster, but response times then reveal them."
    )


@dataclass(frozen=True, slots=True)
class LimitConfig:
    """A limit in addition to those of the tiers: per user, per key, per model, or for one tenant."""

    per: Literal["tenant", "user", "key", "model"] = setting("user", doc="Whose usage is counted together.")
    tier: str = setting("", doc="Only for callers of this tier.")
    tenant: str = setting("", doc="Only for this tenant.")
    model: str = setting("", doc="Only for this model.")
    requests_per_minute: int | None = setting(None, doc="Requests per minute.", least=1, example="60")
    tokens_per_minute: int | None = setting(
        None, doc="Prompt and completion tokens per minute.", least=1, example="20000"
    )
    concurrent_requests: int | None = setting(None, doc="Concurrent requests.", least=1, example="4")
    daily_budget: float | None = setting(None, doc="Dollars per day (UTC).", least=0, example="1")
    monthly_budget: float | None = setting(None, doc="Dollars per calendar month (UTC).", least=0, example="20")
    context_tokens: int | None = setting(
        None, doc="Maximum of prompt and completion tokens together, in one request.", least=1, example="16384"
    )
    output_tokens: int | None = setting(None, doc="Maximum completion tokens of an answer.", least=1, example="2048")
    time_limit_s: float | None = setting(
        None, doc="Time limit of a request in seconds; it then ends with what it has.", least=0.1, example="60"
    )
    choices: int | None = setting(None, doc="Maximum of choices and prompts per request.", least=1, example="4")
    tools: int | None = setting(None, doc="Maximum of tools that a request offers; 0: none.", least=0, example="16")
    tool_rounds: int | None = setting(
        None, doc="Maximum of rounds of calls to tools that the gateway runs; 0: none.", least=0, example="4"
    )


@dataclass(frozen=True, slots=True)
class CountersConfig:
    """Where usage is counted against limits."""

    url: str = setting("", doc="redis://HOST:PORT, if several gateways share limits; empty: in this process.")
    fallback: Literal["open", "closed"] = setting(
        "open", doc="While Redis is unavailable: open: each gateway counts on its own; closed: requests are refused."
    )


@dataclass(frozen=True, slots=True)
class ResilienceConfig:
    """What happens to requests when their replica dies, stalls or fails."""

    attempts: int = setting(3, doc="Replicas that may fail under a request before it gets an error.", least=1)
    resume_s: float = setting(
        30.0, doc="Seconds an interrupted stream waits for a replica that can continue it, before it fails.",
        least=0,
    )  # fmt: skip
    stall_s: float = setting(
        15.0, doc="Seconds with work but without a step after which a replica's requests move to another one.",
        least=0.1,
    )  # fmt: skip
    frozen_s: float = setting(
        30.0, doc="Seconds without a heartbeat after which an engine or gateway of this server is killed and "
        "restarted; 0: never. An engine that is only stuck in a step ends itself, see models[N].watchdog_s.",
        least=0,
    )  # fmt: skip
    retry_share: float = setting(
        0.1, doc="Maximum of retries and hedges as a share of requests; failover from a dead replica is free.",
        least=0, most=1,
    )  # fmt: skip
    hedge_s: float | None = setting(
        None, doc="Seconds without a token after which a request is hedged on a second replica; when not set, never.",
        least=0.001, example="2",
    )  # fmt: skip
    breaker_failures: int = setting(
        3, doc="Failures within 30 s (at least half of all) after which a replica's circuit breaker opens.", least=1
    )
    breaker_open_s: float = setting(
        2.0, doc="Seconds that the breaker stays open; doubled each time in a row, up to a minute.", least=0.01
    )


@dataclass(frozen=True, slots=True)
class PriceConfig:
    """Prices that differ from the model's own; the most specific entry applies."""

    model: str = setting("", doc="Model it applies to; empty: any.")
    adapter: str = setting("", doc="Adapter it applies to; empty: any.")
    tier: str = setting("", doc="Tier it applies to; empty: any.")
    input_price: float = setting(0.0, doc="Price per million prompt tokens.", least=0)
    cached_price: float | None = setting(
        None, doc="Price per million cached prompt tokens; when not set, half of input_price.", least=0,
        example="0.05",
    )  # fmt: skip
    output_price: float = setting(0.0, doc="Price per million completion tokens.", least=0)
    batch_percent: int = setting(
        50, doc="Percentage of these prices for batches and for tiers of class 2.", least=0, most=100
    )


@dataclass(frozen=True, slots=True)
class RequestLogConfig:
    """One entry per request: caller, model, tokens, latency. Never its text."""

    url: str = setting(
        "", doc="sqlite:, postgresql:, kafka://HOST:PORT/TOPIC or clickhouse://HOST:PORT/DATABASE; empty: the "
        "store; off: none.", off=True,
    )  # fmt: skip
    retention_days: float | None = setting(30.0, doc="Days that entries are kept; null: for ever.", least=0.01)
    summary_days: float | None = setting(
        400.0, doc="Days that summaries in ClickHouse (cost, latency, outcomes, votes) are kept; null: for ever.",
        least=0.01,
    )  # fmt: skip
    batch: int = setting(500, doc="Maximum of entries per write.", least=1, most=10_000)
    flush_s: float = setting(1.0, doc="Seconds an entry waits for others to be written together.", least=0.01)
    spool: str = setting(
        "", doc="Folder for entries while the sink is unavailable; empty: beside the SQLite store, or this user's."
    )
    spool_limit: int = setting(
        512 * 2**20, doc="Maximum size of the spool per gateway process; further entries are lost and counted.",
        least=0,
        size=True,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoggingConfig:
    """Logs, written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = setting("info", doc="Lowest level to log.")
    format: Literal["text", "json"] = setting("text", doc="Readable lines, or one JSON object per line.")


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """Metrics and traces."""

    most_series: int = setting(
        1000, doc="Maximum of series by tenant, model, adapter and feature; further ones count as `other`.", least=1
    )
    recent_requests: int = setting(
        1000, doc="Requests whose timelines are kept in memory for `penstock trace`.", least=0, most=1_000_000
    )
    slow_request_s: float | None = setting(
        60.0, doc="Seconds after which a request is logged as slow, with the time of each phase; null: never.", least=0
    )
    slow_ttft_s: float | None = setting(3.0, doc="The same for the time to first token.", least=0)
    record_text: bool = setting(
        False, doc="Write prompts and answers into logs and traces; they may contain personal data."
    )
    otlp_endpoint: str = setting(
        "", doc="OTLP endpoint for OpenTelemetry spans over HTTP (http://HOST:4318); empty: none."
    )
    otlp_headers: tuple[str, ...] = setting((), doc="Headers for it, as NAME=VALUE.", example="[x-token=SECRET]")
    otlp_metrics_s: float | None = setting(
        None, doc="Seconds between pushes of metrics to otlp_endpoint; null: metrics are only scraped.",
        least=0.01, example="15",
    )  # fmt: skip
    trace_share: float = setting(
        1.0, doc="Share of requests to trace when the caller does not decide (traceparent).", least=0, most=1
    )
    service_name: str = setting("penstock", doc="Name of this server in traces.")


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
    experiments: tuple[ExperimentConfig, ...] = ()
    resilience: ResilienceConfig = dataclasses.field(default_factory=ResilienceConfig)
    admission: AdmissionConfig = dataclasses.field(default_factory=AdmissionConfig)
    prices: tuple[PriceConfig, ...] = ()
    guardrails: tuple[GuardrailConfig, ...] = ()
    conversations: ConversationsConfig = dataclasses.field(default_factory=ConversationsConfig)
    tools: ToolsConfig = dataclasses.field(default_factory=ToolsConfig)
    webhooks: WebhooksConfig = dataclasses.field(default_factory=WebhooksConfig)
    input_files: InputFilesConfig = dataclasses.field(default_factory=InputFilesConfig)
    tool_servers: tuple[ToolServerConfig, ...] = ()
    knowledge: KnowledgeConfig = dataclasses.field(default_factory=KnowledgeConfig)
    judge: JudgeConfig = dataclasses.field(default_factory=JudgeConfig)
    watermark: WatermarkConfig = dataclasses.field(default_factory=WatermarkConfig)
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    fleet: FleetConfig = dataclasses.field(default_factory=FleetConfig)
    audit: AuditConfig = dataclasses.field(default_factory=AuditConfig)
    request_log: RequestLogConfig = dataclasses.field(default_factory=RequestLogConfig)
    log_pipeline: LogPipelineConfig = dataclasses.field(default_factory=LogPipelineConfig)
    telemetry: TelemetryConfig = dataclasses.field(default_factory=TelemetryConfig)
    batches: BatchesConfig = dataclasses.field(default_factory=BatchesConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
