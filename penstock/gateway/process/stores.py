"""The tables of the gateway's database, opened and migrated together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from penstock.gateway.api.openai.chat_store import ChatStore
from penstock.gateway.api.openai.responses.store import NoResponseStore, ResponseStore
from penstock.gateway.batches.files import FileStore
from penstock.gateway.batches.store import BatchStore
from penstock.gateway.process.settings import GatewaySettings
from penstock.gateway.quality.feedback import Feedback
from penstock.gateway.webhooks.store import WebhookStore
from penstock.identity import IdentityStore
from penstock.metering.audit import AuditStore
from penstock.metering.ledger import Ledger
from penstock.storage import Database
from penstock.telemetry.exposition import MetricRegistry
from penstock.tools.execution.specs import ToolSpecStore


@dataclass(frozen=True, slots=True)
class Stores:
    identities: IdentityStore
    responses: ResponseStore | NoResponseStore
    chats: ChatStore | None
    feedback: Feedback
    files: FileStore
    batches: BatchStore
    tools: ToolSpecStore
    ledger: Ledger
    audit: AuditStore
    webhooks: WebhookStore | None


async def open_stores(database: Database, settings: GatewaySettings, metrics: MetricRegistry) -> Stores:
    stores = Stores(
        identities=IdentityStore(database),
        responses=ResponseStore(database, keep_s=settings.keep_responses_s, most=settings.responses_per_tenant)
        if settings.responses_per_tenant
        else NoResponseStore(),
        chats=ChatStore(database, keep_s=settings.keep_responses_s, most=settings.responses_per_tenant)
        if settings.responses_per_tenant
        else None,
        feedback=Feedback(database, metrics),
        files=FileStore(database, keep_s=settings.batches.keep_files_s),
        batches=BatchStore(database),
        tools=ToolSpecStore(database),
        ledger=Ledger(database, durable=settings.durable_charges),
        audit=AuditStore(
            database,
            retention_s=None if settings.audit.retention_days is None else settings.audit.retention_days * 86400,
            most=settings.audit.max_entries,
        ),
        webhooks=WebhookStore(database, most_waiting=settings.webhooks.waiting_per_endpoint)
        if settings.webhooks.enabled
        else None,
    )
    await stores.identities.prepare()
    if isinstance(stores.responses, ResponseStore):
        await stores.responses.prepare()
    if stores.chats is not None:
        await stores.chats.prepare()
    await stores.feedback.prepare()
    await stores.files.prepare()
    await stores.batches.prepare()
    await stores.tools.prepare()
    await stores.audit.prepare()
    if stores.webhooks is not None:
        await stores.webhooks.prepare()
        stores.batches.announce = partial(stores.webhooks.event, "batches")
        if isinstance(stores.responses, ResponseStore):
            stores.responses.background.announce = partial(stores.webhooks.event, "responses")
    return stores
