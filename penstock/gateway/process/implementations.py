"""Which implementation of a part the configuration asks for."""

from __future__ import annotations

from collections.abc import Callable

from penstock.config.cache import CacheConfig
from penstock.config.context import ConversationsConfig
from penstock.config.schema import CountersConfig
from penstock.conversations import ConversationStore, Sessions
from penstock.conversations.store import SqlConversations
from penstock.errors import ConfigError
from penstock.gateway.app.authentication import Authentication, OpenAuthentication
from penstock.gateway.app.browsers import BrowserGuard
from penstock.gateway.app.tracing import RequestTracing
from penstock.gateway.process.settings import GatewaySettings
from penstock.gateway.process.stores import Stores
from penstock.gateway.response_cache.cache import ResponseCache, ResponseCacheOff, open_store
from penstock.gateway.workers.group import CoordinatedWorker, SingleWorker, WorkerGroup
from penstock.identity import KeyRing
from penstock.identity.access import UNLIMITED, AllowList
from penstock.limits import LimitStore
from penstock.routing.encoders import Encoders
from penstock.storage import Database
from penstock.storage.database import redacted
from penstock.telemetry.cache_metrics import CacheMetrics
from penstock.telemetry.metrics import Metrics


def authentication(settings: GatewaySettings, stores: Stores | None) -> OpenAuthentication:
    guard = BrowserGuard(settings.trusted_hosts, settings.cors_origins)
    tiers = {tier.name: AllowList.configured(tier.allow) for tier in settings.tiers}
    default = tiers.get(settings.default_tier, UNLIMITED)
    if stores is None:
        return OpenAuthentication(settings.default_tier, guard, default)
    keyring = KeyRing(
        stores.identities,
        default_tier=settings.default_tier,
        tiers=tiers,
        fresh_s=settings.key_fresh_s,
        grace_s=settings.key_grace_s,
    )
    return Authentication(keyring, settings.default_tier, guard, default)


def worker_group(
    settings: GatewaySettings, metrics: Metrics, tracing: RequestTracing, refresh_keys: Callable[[], None]
) -> WorkerGroup:
    worker = settings.worker
    if worker is None:
        return SingleWorker(metrics, tracing.recent, refresh_keys)
    return CoordinatedWorker(worker.coordinator, worker.number, metrics, tracing.recent, refresh_keys)


def limit_counters(config: CountersConfig, local: LimitStore) -> LimitStore:
    if not config.url:
        return local
    from penstock.limits.redis import RedisLimits

    return RedisLimits(config.url, fallback=config.fallback, local=local)


def response_cache(config: CacheConfig, encoders: Encoders, metrics: Metrics) -> ResponseCache | ResponseCacheOff:
    if config.exact == config.semantic == "off":
        return ResponseCacheOff()
    encoder = None
    if config.semantic != "off":
        encoder = encoders.any(config.encoder) if config.encoder else encoders.default
    return ResponseCache(config, open_store(config), encoder, CacheMetrics(metrics.registry))


def conversation_sessions(config: ConversationsConfig, database: Database | None) -> Sessions | None:
    """None when no conversations are stored."""
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
