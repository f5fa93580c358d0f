"""Endpoints of features that a gateway may lack, for want of a store or of a setting: they are there in any case, and
say so."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.conversations import Sessions
from penstock.gateway.api.account import AccountEndpoints
from penstock.gateway.api.admin.audit import AuditEndpoints
from penstock.gateway.api.admin.identity import IdentityEndpoints
from penstock.gateway.api.admin.request_log import RequestLogEndpoints
from penstock.gateway.api.admin.usage import UsageEndpoints
from penstock.gateway.api.endpoints import ENDPOINTS
from penstock.gateway.api.openai.chat_store import ChatStore
from penstock.gateway.api.openai.conversations import ConversationItemEndpoints
from penstock.gateway.api.openai.stored_chat import StoredChatEndpoints
from penstock.gateway.app.endpoint import Unavailable
from penstock.gateway.app.uploads import UploadSlots
from penstock.gateway.batches.batch_endpoints import BatchEndpoints
from penstock.gateway.batches.file_endpoints import FileEndpoints
from penstock.gateway.batches.message_batches import MessageBatchEndpoints
from penstock.gateway.batches.upload_endpoints import UploadEndpoints
from penstock.gateway.generation.input_files import InputFiles
from penstock.gateway.generation.permissions import Permissions
from penstock.gateway.moderation.guardrails import Guardrails
from penstock.gateway.process.gateway import Gateway
from penstock.gateway.process.request_log import RequestLogOff
from penstock.gateway.process.settings import GatewaySettings
from penstock.gateway.process.stores import Stores
from penstock.gateway.quality.endpoints import FeedbackEndpoints
from penstock.gateway.response_cache.cache import ResponseCache, ResponseCacheOff
from penstock.gateway.response_cache.endpoints import CacheEndpoints
from penstock.gateway.webhooks.delivery import WebhookClient
from penstock.gateway.webhooks.endpoints import WebhookEndpoints
from penstock.gateway.webhooks.operator_endpoints import OperatorWebhookEndpoints
from penstock.metering.request_log import RequestLog
from penstock.metering.request_store import RequestStore
from penstock.protocol.errors import KeyStoreUnavailable, NotFound, ServiceUnavailable

_NO_ACCOUNTS = "This gateway keeps no accounts, so it cannot tell whose an answer is."
_WITHOUT_STORE = (
    Unavailable(FileEndpoints, ServiceUnavailable, "This gateway has no store for files."),
    Unavailable(UploadEndpoints, ServiceUnavailable, "This gateway has no store for files."),
    Unavailable(BatchEndpoints, ServiceUnavailable, "This gateway has no store for batches."),
    Unavailable(MessageBatchEndpoints, ServiceUnavailable, "This gateway has no store for batches."),
    Unavailable(FeedbackEndpoints, ServiceUnavailable, _NO_ACCOUNTS),
    Unavailable(UsageEndpoints, ServiceUnavailable, "This gateway keeps no accounts."),
    Unavailable(AccountEndpoints, KeyStoreUnavailable, "This gateway runs without a store for tenants and keys."),
    Unavailable(IdentityEndpoints, KeyStoreUnavailable, "This gateway runs without a store for tenants and keys."),
)


def of_stored_chats(store: ChatStore | None, permissions: Permissions, limit: int) -> StoredChatEndpoints | Unavailable:
    if store is not None:
        return StoredChatEndpoints(store, permissions, limit)
    return Unavailable(StoredChatEndpoints, NotFound, "This gateway stores no chat completions.")


def of_conversation_items(
    sessions: Sessions | None, guardrails: Guardrails, limit: int, files: InputFiles
) -> ConversationItemEndpoints | Unavailable:
    if sessions is not None:
        return ConversationItemEndpoints(sessions, guardrails, limit, files)
    return Unavailable(ConversationItemEndpoints, ServiceUnavailable, "This gateway stores no conversations.")


def of_cache(cache: ResponseCache | ResponseCacheOff, permissions: Permissions) -> CacheEndpoints | Unavailable:
    if isinstance(cache, ResponseCache):
        return CacheEndpoints(cache, permissions)
    message = "This server has no response cache; `cache.exact` and `cache.semantic` are off."
    return Unavailable(CacheEndpoints, NotFound, message)


def of_request_log(log: RequestLog | RequestLogOff, permissions: Permissions) -> RequestLogEndpoints | Unavailable:
    if isinstance(log.sink, RequestStore):
        return RequestLogEndpoints(
            log.sink, permissions, [endpoint.path for endpoint in ENDPOINTS if endpoint.serves_tokens]
        )
    message = "This gateway has no request log that it could read; see `request_log.url`."
    return Unavailable(RequestLogEndpoints, ServiceUnavailable, message)


def of_audit_log(stores: Stores | None) -> AuditEndpoints | Unavailable:
    if stores is None:
        return Unavailable(AuditEndpoints, ServiceUnavailable, "This gateway keeps no audit log.")
    return AuditEndpoints(stores.audit)


def of_webhooks(
    stores: Stores | None, client: WebhookClient | None, settings: GatewaySettings
) -> Sequence[WebhookEndpoints | OperatorWebhookEndpoints | Unavailable]:
    if stores is None or stores.webhooks is None or client is None:
        message = "This server sends no webhooks: `webhooks.enabled` is off, or it has no store."
        return [
            Unavailable(WebhookEndpoints, NotFound, message),
            Unavailable(OperatorWebhookEndpoints, NotFound, message),
        ]
    return [
        WebhookEndpoints(stores.webhooks, client, settings.webhooks, settings.body_limit),
        OperatorWebhookEndpoints(stores.webhooks, client, settings.body_limit),
    ]


def of_store(gateway: Gateway, uploads: UploadSlots) -> Sequence[object]:
    """Those of files, batches, feedback, usage, accounts and identities."""
    settings, stores, runner, quotas = gateway.settings, gateway.stores, gateway.batch_runner, gateway.quotas
    if stores is None or runner is None:
        return _WITHOUT_STORE
    limit = settings.body_limit
    return [
        FileEndpoints(stores.files, stores.batches, settings.batches, uploads, gateway.knowledge.forget_file),
        UploadEndpoints(stores.files, settings.batches, uploads, limit),
        BatchEndpoints(stores.batches, stores.files, runner, limit),
        MessageBatchEndpoints(stores.batches, stores.files, runner, settings.batches, uploads),
        FeedbackEndpoints(stores.feedback, gateway.permissions, gateway.cache.suspect, limit),
        UsageEndpoints(stores.ledger, gateway.permissions),
        IdentityEndpoints(
            stores.identities,
            stores.ledger,
            quotas,
            gateway.workers.keys_changed,
            [tier.name for tier in settings.tiers],
            settings.default_tier,
            limit,
        ),
        AccountEndpoints(stores.identities, stores.ledger, quotas),
    ]
