"""/v1/batches: the requests of a file, answered at low priority and a lower price."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from penstock.gateway.accounting.targets import check_targets
from penstock.gateway.app.data_rules import sent_require
from penstock.gateway.app.decoding import decode, decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.pagination import NoQuery, page
from penstock.gateway.app.store_access import store_of
from penstock.gateway.batches.files import FileStore
from penstock.gateway.batches.lines import ENDPOINTS
from penstock.gateway.batches.runner import BatchRunner
from penstock.gateway.batches.store import Batch, BatchStore
from penstock.protocol.errors import InvalidRequest, NotFound

_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}
LONGEST_S = 7 * 86400.0
Word = Annotated[str, msgspec.Meta(max_length=512)]


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """POST /v1/batches"""

    input_file_id: Word
    endpoint: Word
    completion_window: Word
    metadata: Annotated[dict[Annotated[str, msgspec.Meta(max_length=64)], Word], msgspec.Meta(max_length=16)] | None = (
        None
    )


class BatchesQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20


_decoder = msgspec.json.Decoder(BatchRequest)


class BatchEndpoints:
    """The batches of a tenant."""

    def __init__(self, batches: BatchStore, files: FileStore, runner: BatchRunner, body_limit: int) -> None:
        self._batches = batches
        self._files = files
        self._runner = runner
        self._body_limit = body_limit

    async def create_batch(self, exchange: Exchange) -> None:
        request = decode(_decoder, await exchange.body(self._body_limit))
        check_targets(exchange, followed=())
        batches, files, caller = self._batches, self._files, exchange.caller
        if request.endpoint not in ENDPOINTS or not self._runner.serves(request.endpoint):
            served = ", ".join(path for path in ENDPOINTS if self._runner.serves(path))
            raise InvalidRequest(f"`endpoint` is one of {served}.", param="endpoint")
        window_s = _window(request.completion_window)
        with store_of("files and batches"):
            file = await files.get(request.input_file_id, caller.tenant, caller.only_user)
            if file is None:
                raise InvalidRequest(f"There is no file `{request.input_file_id[:128]}`.", param="input_file_id")
            if file.purpose != "batch":
                raise InvalidRequest(f"`{file.id}` was not sent with the purpose `batch`.", param="input_file_id")
            batch = await batches.create(
                caller.tenant,
                user=caller.user,
                key=caller.key,
                endpoint=request.endpoint,
                input_file_id=file.id,
                window=request.completion_window,
                window_s=window_s,
                metadata=request.metadata or {},
                require=sent_require(exchange),
            )
        self._runner.wake()
        await exchange.reply_json(batch.shown())

    async def list_batches(self, exchange: Exchange) -> None:
        asked = decode_query(BatchesQuery, exchange.scope)
        batches = self._batches
        with store_of("files and batches"):
            after = await _found(batches, exchange, asked.after) if asked.after else None
            found = await batches.page(
                exchange.caller.tenant, exchange.caller.only_user, after=after, limit=asked.limit + 1
            )
        await exchange.reply_json(page(found, asked.limit))

    async def get_batch(self, exchange: Exchange) -> None:
        decode_query(NoQuery, exchange.scope)
        with store_of("files and batches"):
            batch = await _found(self._batches, exchange, exchange.path.rpartition("/")[2])
        await exchange.reply_json(batch.shown())

    async def cancel_batch(self, exchange: Exchange) -> None:
        batches, id = self._batches, exchange.path.split("/")[-2]
        with store_of("files and batches"):
            batch = await _found(batches, exchange, id)
            if not await batches.cancel(id, exchange.caller.tenant) and batch.status != "cancelling":
                raise InvalidRequest(f"`{id}` is {batch.status}, so it cannot be cancelled.", code="batch_over")
            batch = await _found(batches, exchange, id)
        self._runner.wake()
        await exchange.reply_json(batch.shown())


async def _found(batches: BatchStore, exchange: Exchange, id: str) -> Batch:
    batch = await batches.get(id, exchange.caller.tenant, exchange.caller.only_user)
    if batch is None:
        raise NotFound(f"There is no batch `{id[:128]}`.")
    return batch


def _window(text: str) -> float:
    """Seconds of `24h`, `90m` or `7d`."""
    match = re.fullmatch(r"([1-9]\d{0,4})([mhd])", text, re.ASCII)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < seconds <= LONGEST_S:
        raise InvalidRequest("`completion_window` is a time such as `24h`, at most `7d`.", param="completion_window")
    return seconds
