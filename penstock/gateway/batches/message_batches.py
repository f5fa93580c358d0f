"""/v1/messages/batches: batches whose requests come in the body that creates them, and whose results are one list.

Such a batch is an ordinary one for the runner: its requests are kept as an input file, its results as output files.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec

from penstock.config.batches import BatchesConfig
from penstock.gateway.accounting.targets import check_targets
from penstock.gateway.app.data_rules import sent_require
from penstock.gateway.app.decoding import decode, decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.pagination import listed
from penstock.gateway.app.store_access import store_of
from penstock.gateway.app.uploads import UploadSlots
from penstock.gateway.batches.file_endpoints import check_room
from penstock.gateway.batches.files import File, FileStore
from penstock.gateway.batches.message_lines import MESSAGES, message_line
from penstock.gateway.batches.runner import BatchRunner
from penstock.gateway.batches.store import ACTIVE, Batch, BatchStore
from penstock.protocol.errors import InvalidRequest, NotFound

WINDOW_S = 86400.0
JSONL = b"application/x-jsonl"


class MessageBatchLine(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One request: `params` are the body of a message, without `stream`; they are checked when it runs."""

    custom_id: Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    params: msgspec.Raw


class MessageBatchRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """POST /v1/messages/batches"""

    requests: Annotated[list[MessageBatchLine], msgspec.Meta(min_length=1)]


class MessageBatchQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    beta: str | None = None
    """Sent by the beta part of the SDK; the same either way."""


class MessageBatchesQuery(MessageBatchQuery, frozen=True):
    after_id: str | None = None
    before_id: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 20


class _Params(msgspec.Struct):
    stream: Any = None


_decoder = msgspec.json.Decoder(MessageBatchRequest)
_params = msgspec.json.Decoder(_Params)


class MessageBatchEndpoints:
    """The batches of messages of a tenant."""

    def __init__(
        self, batches: BatchStore, files: FileStore, runner: BatchRunner, config: BatchesConfig, uploads: UploadSlots
    ) -> None:
        self._batches = batches
        self._files = files
        self._runner = runner
        self._config = config
        self._uploads = uploads

    async def create_message_batch(self, exchange: Exchange) -> None:
        decode_query(MessageBatchQuery, exchange.scope)
        check_targets(exchange, followed=())
        caller = exchange.caller
        async with exchange.upload(self._config.file_limit) as arrived, self._uploads.slot(caller.tenant):
            body = await arrived.read()
            text, total = await asyncio.to_thread(_input, body, self._config.most_lines)
            with store_of("files and batches"):
                await check_room(self._files, self._config, caller.tenant, len(body), "requests")
                del body
                file = await self._files.create(caller.tenant, "messages.jsonl", "batch", text, user=caller.user)
                batch = await self._batches.create(
                    caller.tenant,
                    user=caller.user,
                    key=caller.key,
                    endpoint=MESSAGES,
                    input_file_id=file.id,
                    window="24h",
                    window_s=WINDOW_S,
                    metadata={},
                    total=total,
                    kind="msgbatch",
                    require=sent_require(exchange),
                )
        self._runner.wake()
        await exchange.reply_json(shown(batch))

    async def list_message_batches(self, exchange: Exchange) -> None:
        asked = decode_query(MessageBatchesQuery, exchange.scope)
        if asked.after_id and asked.before_id:
            raise InvalidRequest("Send `after_id` or `before_id`, not both.", param="before_id")
        caller = exchange.caller
        with store_of("files and batches"):
            found = await self._batches.page(
                caller.tenant,
                caller.only_user,
                after=await self._found(exchange, asked.after_id) if asked.after_id else None,
                before=await self._found(exchange, asked.before_id) if asked.before_id else None,
                endpoint=MESSAGES,
                limit=asked.limit + 1,
            )
        if asked.before_id and len(found) > asked.limit:  # what is too much is at the other end
            found = [*found[1:], found[0]]
        page = listed([shown(batch) for batch in found], asked.limit)
        del page["object"]
        await exchange.reply_json(page)

    async def get_message_batch(self, exchange: Exchange) -> None:
        decode_query(MessageBatchQuery, exchange.scope)
        with store_of("files and batches"):
            batch = await self._found(exchange, exchange.path.rpartition("/")[2])
        await exchange.reply_json(shown(batch))

    async def cancel_message_batch(self, exchange: Exchange) -> None:
        decode_query(MessageBatchQuery, exchange.scope)
        id = exchange.path.split("/")[-2]
        with store_of("files and batches"):
            batch = await self._found(exchange, id)
            # One that is nearly over ends as it is; cancelling twice is the same as once.
            if not await self._batches.cancel(id, exchange.caller.tenant) and batch.status not in ACTIVE:
                raise InvalidRequest(f"`{id}` has ended, so it cannot be cancelled.", code="batch_over")
            batch = await self._found(exchange, id)
        self._runner.wake()
        await exchange.reply_json(shown(batch))

    async def delete_message_batch(self, exchange: Exchange) -> None:
        decode_query(MessageBatchQuery, exchange.scope)
        with store_of("files and batches"):
            batch = await self._found(exchange, exchange.path.rpartition("/")[2])
            if not await self._batches.delete(batch.id, exchange.caller.tenant):
                raise InvalidRequest(f"`{batch.id}` has not ended; cancel it first.", code="batch_not_over")
            for file in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
                if file is not None:
                    await self._files.delete(file)
        await exchange.reply_json({"id": batch.id, "type": "message_batch_deleted"})

    async def message_batch_results(self, exchange: Exchange) -> None:
        decode_query(MessageBatchQuery, exchange.scope)
        with store_of("files and batches"):
            batch = await self._found(exchange, exchange.path.split("/")[-2])
            if batch.status in ACTIVE:
                raise InvalidRequest(
                    f"`{batch.id}` has not ended; its results are not there yet.", code="batch_not_over"
                )
            files: list[File] = []
            for id in (batch.output_file_id, batch.error_file_id):
                if id is not None:
                    if (file := await self._files.get(id, batch.tenant)) is None:
                        raise NotFound(f"The results of `{batch.id}` are no longer kept.")
                    files.append(file)
        await exchange.reply_parts(self._content(files), sum(file.bytes for file in files), JSONL)

    async def _content(self, files: list[File]) -> AsyncIterator[bytes]:
        for file in files:
            async for part in self._files.content(file.id):
                yield part.encode()

    async def _found(self, exchange: Exchange, id: str) -> Batch:
        batch = await self._batches.get(id, exchange.caller.tenant, exchange.caller.only_user)
        if batch is None or batch.endpoint != MESSAGES:
            raise NotFound(f"There is no batch of messages `{id[:128]}`.")
        return batch


def shown(batch: Batch) -> dict[str, Any]:
    """The batch as the Messages API has it."""
    over = batch.status not in ACTIVE
    ended = (batch.completed_at, batch.cancelled_at, batch.expired_at, batch.failed_at)
    done = batch.completed + batch.failed
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if over else "canceling" if batch.status == "cancelling" else "in_progress",
        "request_counts": {
            "processing": 0 if over else batch.total - done,
            "succeeded": batch.completed,
            # A batch that failed as a whole has answered nothing.
            "errored": batch.total if batch.status == "failed" else batch.failed - batch.unanswered,
            "canceled": 0 if batch.status == "expired" else batch.unanswered,
            "expired": batch.unanswered if batch.status == "expired" else 0,
        },
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "ended_at": _time(next((at for at in ended if at is not None), None)) if over else None,
        "cancel_initiated_at": _time(batch.cancelling_at),
        "archived_at": None,
        # Without a host: clients add the one that they know this server by.
        "results_url": f"{MESSAGES}/batches/{batch.id}/results" if over else None,
    }


def _time(at: float | None) -> str | None:
    return None if at is None else datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat().replace("+00:00", "Z")


def _input(body: bytes, most: int) -> tuple[str, int]:
    """The input file of a batch and the number of its requests."""
    requests = decode(_decoder, body).requests
    if b"\0" in body:
        raise InvalidRequest("The request body has a NUL character.", code="invalid_json")
    if len(requests) > most:
        raise InvalidRequest(f"A batch has at most {most} requests; this one has {len(requests)}.", param="requests")
    seen: set[str] = set()
    lines = []
    for index, request in enumerate(requests):
        at = f"requests[{index}]"
        if request.custom_id in seen:
            raise InvalidRequest(f"`{at}.custom_id`: another request has the same.", param=f"{at}.custom_id")
        seen.add(request.custom_id)
        if decode(_params, request.params, f"{at}.params").stream:
            raise InvalidRequest(f"`{at}.params.stream`: a batch cannot be streamed.", param=f"{at}.params.stream")
        try:
            lines.append(message_line(request.custom_id, request.params))
        except UnicodeDecodeError:
            raise InvalidRequest(
                f"`{at}.params` is not valid UTF-8.", param=f"{at}.params", code="invalid_json"
            ) from None
    return "".join(lines), len(requests)
