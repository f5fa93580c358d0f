"""/api/pull loads a model, as `POST /v1/admin/models` does, and reports the progress. What would change a store
(create, copy, delete, push) is refused with a reason: models come from the configuration and from sources."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.config.load import model_name
from penstock.gateway.api.admin.supervisor import Supervisor
from penstock.gateway.api.ollama.catalogue import LATEST, Catalogue
from penstock.gateway.api.ollama.renderer import NDJSON
from penstock.gateway.api.ollama.schemas import OllamaPullRequest
from penstock.gateway.app.dialects import OLLAMA
from penstock.gateway.app.exchange import Exchange, encode_json
from penstock.gateway.generation.request_decoder import RequestDecoder
from penstock.protocol.control import LoadModel
from penstock.protocol.errors import ApiError, InvalidRequest

_pull = RequestDecoder(OllamaPullRequest)
REPORT_S = 0.5
WHOLE = 1000
"""Progress is reported in thousandths of a phase, in the place of bytes."""


class OllamaPullEndpoints:
    """Loads models; refuses what cannot be done to them."""

    def __init__(self, catalogue: Catalogue, supervisor: Supervisor, body_limit: int) -> None:
        self._catalogue = catalogue
        self._supervisor = supervisor
        self._body_limit = body_limit

    async def ollama_pull(self, exchange: Exchange) -> None:
        request = _pull(exchange, await exchange.body(self._body_limit))
        asked = request.model or request.name
        if not asked:
            raise InvalidRequest("Missing required parameter: `model`.", param="model", code="missing_parameter")
        streams = request.stream is not False
        if self._catalogue.knows(exchange.caller, self._catalogue.resolve(exchange.caller, asked)):
            await exchange.reply(200, _line("success"), NDJSON if streams else b"application/json")
            return
        source = asked.removesuffix(LATEST)
        name = model_name(source)
        described = {"source": source, "name": name}
        loading = asyncio.create_task(
            self._supervisor.ask(lambda number: LoadModel(number, described)), name="pulling a model"
        )
        try:
            if not streams:
                await loading
                await exchange.reply(200, _line("success"))
                return
            await self._report(exchange, loading, name)
        finally:
            loading.cancel()  # if the client left: the supervisor goes on by itself

    async def _report(self, exchange: Exchange, loading: asyncio.Task[None], name: str) -> None:
        await asyncio.wait((loading,), timeout=REPORT_S)
        if loading.done():
            loading.result()  # an early failure is a real status code
        await exchange.start_stream(NDJSON)
        await exchange.write(_line("pulling manifest"))
        while not loading.done():
            progress = self._supervisor.loading.get(name)
            if progress is not None and progress.phase:
                done = round(progress.fraction * WHOLE)
                await exchange.write(_line(progress.phase, completed=done, total=WHOLE))
            await asyncio.wait((loading,), timeout=REPORT_S)
        try:
            loading.result()
        except ApiError as error:
            await exchange.end_stream(encode_json(OLLAMA.error(error, exchange.request_id)) + b"\n")
            return
        await exchange.end_stream(_line("success"))

    async def ollama_delete(self, exchange: Exchange) -> None:
        await self._refuse(exchange, "delete", "DELETE /v1/admin/models/NAME unloads a model; its files stay")

    async def ollama_create(self, exchange: Exchange) -> None:
        await self._refuse(exchange, "create", "add the model, or an adapter, to the configuration")

    async def ollama_blob(self, exchange: Exchange) -> None:
        await self._refuse(exchange, "blobs", "models are loaded from the sources of the configuration or of /api/pull")

    async def ollama_copy(self, exchange: Exchange) -> None:
        await self._refuse(exchange, "copy", "give the model `aliases` in the configuration")

    async def ollama_push(self, exchange: Exchange) -> None:
        await self._refuse(exchange, "push", "models are not published from here")

    async def _refuse(self, exchange: Exchange, what: str, instead: str) -> None:
        await exchange.body(self._body_limit)
        raise InvalidRequest(f"/api/{what} is not possible on this server: {instead}.", code="unsupported_endpoint")


def _line(status: str, **more: Any) -> bytes:
    return encode_json({"status": status, **more}) + b"\n"
