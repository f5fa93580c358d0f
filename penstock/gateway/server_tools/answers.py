"""Answers to chat requests that name registered tools in `server_tools`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from penstock.config.context import ToolsConfig
from penstock.gateway.app.data_rules import permit, withheld
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.assistant_message import AssembledCall
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.pipeline import GenerationPipeline
from penstock.gateway.generation.sampling import TokenLimit
from penstock.gateway.generation.schemas import ChatRequest
from penstock.gateway.generation.tool_schemas import FunctionDefinition, ToolDefinition
from penstock.gateway.generation.turn import Turn
from penstock.gateway.server_tools.loop import Render, ToolLoop
from penstock.protocol.errors import DataRuleForbids, InvalidRequest, sentence
from penstock.telemetry.logging import RequestRecord
from penstock.tools.execution import Offer, Outcome, ToolError, ToolRegistry


class ToolAnswers(Protocol):
    """Answers chat requests that name server tools."""

    async def answer(
        self, attempt: Attempt, request: ChatRequest, limit: TokenLimit, turn: Turn, render: Render
    ) -> None: ...


class NoServerTools:
    """A gateway where no tools can be registered."""

    async def answer(
        self, attempt: Attempt, request: ChatRequest, limit: TokenLimit, turn: Turn, render: Render
    ) -> None:
        raise InvalidRequest("No tools are registered at this gateway.", param="server_tools")


class ServerTools:
    """The tools that a gateway runs for requests."""

    def __init__(
        self,
        pipeline: GenerationPipeline,
        registry: ToolRegistry,
        config: ToolsConfig,
        log_call: Callable[[RequestRecord], None],
    ) -> None:
        """`log_call`: takes the record of a call to the request log."""
        self.pipeline = pipeline
        self.registry = registry
        self.config = config
        self.log_call = log_call

    async def answer(
        self, attempt: Attempt, request: ChatRequest, limit: TokenLimit, turn: Turn, render: Render
    ) -> None:
        """Answer a chat request. A tool may give another result next time, so nothing is cached."""
        exchange = attempt.exchange
        self.pipeline.cache.check(exchange)
        loop = _ServerToolLoop(self, attempt, request, limit, turn, await self._offers(exchange, request), render)
        await loop.run(stream=bool(request.stream))

    async def _offers(self, exchange: Exchange, request: ChatRequest) -> dict[str, Offer]:
        """The functions that the request asks for; a 400 when one does not exist."""
        if request.tools:
            raise InvalidRequest("`tools` and `server_tools` cannot be used together.", param="server_tools")
        if (request.n or 1) > 1:
            raise InvalidRequest("With `server_tools` there is one answer; `n` must be 1.", param="n")
        try:
            return self._permitted(
                exchange, request, await self.registry.offers(exchange.caller.access, request.server_tools or ())
            )
        except ToolError as error:
            raise InvalidRequest(sentence(error), param="server_tools") from error

    def _permitted(self, exchange: Exchange, request: ChatRequest, offers: dict[str, Offer]) -> dict[str, Offer]:
        """Those that may get data of the request. One that the request names is refused, not left out."""
        if not exchange.demand:
            return offers
        named = {name.partition(".")[0] for name in request.server_tools or ()}
        found = {}
        for name, offer in offers.items():
            unmet = self.registry.unmet(offer.server, exchange.demand)
            if unmet and offer.server in named:
                permit(exchange, "tool", offer.server, unmet)
            if not withheld(exchange, "tool", offer.server, unmet):
                found[name] = offer
        return found


class _ServerToolLoop(ToolLoop):
    """The steps of a chat request that names registered tools."""

    def __init__(
        self,
        tools: ServerTools,
        attempt: Attempt,
        request: ChatRequest,
        limit: TokenLimit,
        turn: Turn,
        offers: dict[str, Offer],
        render: Render,
    ) -> None:
        definitions = [
            ToolDefinition(
                type="function",
                function=FunctionDefinition(
                    name=offer.name,
                    description=offer.function.description,
                    parameters=offer.function.parameters,
                    strict=offer.strict,
                ),
            )
            for offer in offers.values()
        ]
        super().__init__(
            tools, attempt, msgspec.structs.replace(request, tools=definitions or None), limit, turn, render
        )
        self._offers = offers
        self._registry = tools.registry

    def _label(self, name: str) -> str:
        return self._offers[name].full_name if name in self._offers else "unknown"

    async def _outcome(self, call: AssembledCall, arguments: dict[str, Any], generation: Generation) -> Outcome:
        """Run a call, if its server may have what the model says; results and arguments may have marked the request."""
        offer = self._offers.get(call.name)
        if offer is None:
            return Outcome("Error: there is no such tool.", ok=False)
        exchange, registry = self._exchange, self._registry
        await self._pipeline.content_filter.mark(exchange, lambda: [call.arguments or ""])
        if exchange.demand:
            try:
                permit(exchange, "tool", offer.server, registry.unmet(offer.server, exchange.demand))
            except DataRuleForbids as error:
                return Outcome(f"Error: {error.message}", ok=False)
        return await registry.call(offer, arguments)
