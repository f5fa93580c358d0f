"""Tools that the server runs: the model answers, its calls are run, it sees the results and answers again.

Every answer of the model is a generation of its own, with its own reservation and charge, so that what is billed is the
exact sum. The client sees one answer: text as it comes, calls and results as events beside it. The last step allowed
must do without tools, so a loop always ends in words. What a tool does wrong is told to the model, not to the client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from penstock.config.cache import CacheConfig
from penstock.conversations import Message
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.conversations.turn import OpenTurn, Recorder
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.choice import Piece
from penstock.gateway.generation.prepare import prepare_chat
from penstock.gateway.generation.respond import engaged, guard_output
from penstock.gateway.generation.sampling import Limits
from penstock.gateway.generation.schemas import ChatRequest, FunctionDefinition, ToolDefinition
from penstock.gateway.process.service import Service
from penstock.gateway.quality.judge import judge_answer
from penstock.gateway.response_cache.cache import wish_of
from penstock.gateway.server_tools.steps import Call, Step, StepsRenderer, Totals, shown
from penstock.protocol.errors import ApiError, InvalidRequest
from penstock.telemetry.logging import RequestRecord, log_request
from penstock.tools.execution import Offer, Outcome, ToolError, ToolRegistry
from penstock.tools.toolbox import MAX_CALLS

_decoder = msgspec.json.Decoder(dict[str, Any])


Render = Callable[[Generation, "Recorder | None", Totals], StepsRenderer]


async def answer_with_tools(
    service: Service,
    attempt: Attempt,
    request: ChatRequest,
    limit: Limits,
    turn: OpenTurn | None,
    render: Render,
) -> None:
    """Answer a chat request that names tools of the server. Tools may answer otherwise next time: nothing is cached."""
    exchange = attempt.exchange
    wish_of(exchange, CacheConfig())
    loop = _Loop(service, attempt, request, limit, turn, await offered(service, exchange, request), render)
    with exchange.watched(loop.fail):
        if request.stream:
            await loop.stream()
        else:
            await loop.whole()
    if loop.generation is not None:
        judge_answer(service, exchange, loop.generation)


async def offered(service: Service, exchange: Exchange, request: ChatRequest) -> dict[str, Offer]:
    """The functions that the request asks for; a 400 when it asks for what is not there."""
    if request.tools:
        raise InvalidRequest("`tools` and `server_tools` cannot be used together.", param="server_tools")
    if (request.n or 1) > 1:
        raise InvalidRequest("With `server_tools` there is one answer; `n` must be 1.", param="n")
    try:
        return await registry_of(service).offers(exchange.caller.tenant, request.server_tools or ())
    except ToolError as error:
        message = str(error)
        raise InvalidRequest(f"{message[:1].upper()}{message[1:]}.", param="server_tools") from error


def registry_of(service: Service) -> ToolRegistry:
    if service.tools is None:
        raise InvalidRequest("No tools are registered at this gateway.", param="server_tools")
    return service.tools


class _Loop:
    """One request."""

    def __init__(
        self,
        service: Service,
        attempt: Attempt,
        request: ChatRequest,
        limit: Limits,
        turn: OpenTurn | None,
        offers: dict[str, Offer],
        render: Render,
    ) -> None:
        self._service = service
        self._render = render
        self._made: StepsRenderer | None = None
        self._recorder: Recorder | None = None
        self._spoke = False
        """Whether the client has been shown any words: those of the next step then begin a line of their own."""
        self._attempt = attempt
        self._exchange = attempt.exchange
        self._limit = limit
        self._turn = turn
        self._offers = offers
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
        self._request = msgspec.structs.replace(request, tools=definitions or None)
        self._said: list[Message] = []
        """Calls and results so far, as the conversation has them."""
        self._totals = Totals()
        self._error: Exception | None = None
        self.generation: Generation | None = None
        self._running: set[asyncio.Task[Outcome]] = set()
        self._limit_parallel = asyncio.Semaphore(service.settings.tools.max_parallel)

    def fail(self, error: Exception) -> None:
        """The client left: nothing goes on for it."""
        self._error = error
        if self.generation is not None:
            self.generation.fail(error)
        for task in self._running:
            task.cancel()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def whole(self) -> None:
        pieces: list[Piece] = []
        async with aclosing(self._steps()) as steps:
            async for found in steps:
                if isinstance(found, dict):
                    self._totals.events.append(found)
                else:
                    pieces += found
        body = self._renderer.whole([pieces])
        await self._keep()
        await self._exchange.reply(200, body)

    async def stream(self) -> None:
        exchange, waiting = self._exchange, b""
        try:
            async with aclosing(self._steps()) as steps:
                async for found in steps:
                    data = b""
                    if not exchange.response_started:
                        await exchange.start_stream()
                        data = self._renderer.opening()
                    if isinstance(found, dict):
                        data += self._renderer.tool_event(found)
                    else:
                        data += b"".join(map(self._renderer.event, found))
                    if isinstance(found, list) and any(piece.finish_reason for piece in found):
                        waiting = data  # the end is not sent before it is settled and kept
                    else:
                        await exchange.write(data or self._renderer.keep_alive)
            await self._keep()
            await exchange.end_stream(waiting + self._renderer.closing())
        except ApiError as error:
            if not exchange.response_started:
                raise
            exchange.record.finish_reason = "error"
            self._service.metrics.failed(exchange.route, error.status, error.code or error.type)
            await exchange.end_stream(waiting + self._renderer.failure(error))

    async def _keep(self) -> None:
        if self._recorder is not None:
            await self._recorder.keep(self._said)

    async def _steps(self) -> AsyncGenerator[list[Piece] | dict[str, Any], None]:
        """What the client sees, in order: pieces of text, events of calls; an empty list is a silence."""
        most = self._service.settings.tools.max_steps
        for number in range(1, most + 1):
            generation = await self._prepared(number, last=number == most)
            step = Step()
            apart = self._spoke
            async with aclosing(self._run(generation, number)) as running:
                async for pieces in running:
                    seen = []
                    for piece in pieces:
                        step.hear(piece)
                        if (visible := shown(piece)) is not None:
                            if visible.text and apart:
                                visible.text, apart = f"\n\n{visible.text}", False
                            self._spoke = self._spoke or bool(visible.text)
                            seen.append(visible)
                    if seen or not pieces:
                        yield seen
            said: Message = {"role": "assistant", "content": "".join(step.parts)}
            if not step.goes_on:
                self._said.append(said)
                return
            said["tool_calls"] = [call.message() for call in step.calls]
            self._said.append(said)
            self._exchange.record.finish_reason = None
            async with aclosing(self._call(step.calls, number, generation)) as running_calls:
                async for event in running_calls:
                    yield event

    async def _prepared(self, number: int, *, last: bool) -> Generation:
        """The model's next answer. What is forced is forced once: the first answer must call, the last must not."""
        exchange, request = self._exchange, self._request
        self._check()
        if last:
            request = msgspec.structs.replace(request, tools=None, tool_choice=None, parallel_tool_calls=None)
        elif number > 1:
            request = msgspec.structs.replace(request, tool_choice=None)
        self._attempt.release()
        told = len(exchange.extra_headers)
        generation = await prepare_chat(
            self._service, self._attempt, request, self._limit, self._turn, following=self._said
        )
        if number > 1:
            del exchange.extra_headers[told:]
        guard_output(self._service, exchange, generation)
        self._begin(generation)
        return generation

    def _begin(self, generation: Generation) -> None:
        self.generation = generation
        if self._made is None:
            if self._turn is not None:
                self._recorder = Recorder(self._service, self._attempt, generation, self._turn)
            self._made = self._render(generation, self._recorder, self._totals)
            self._exchange.timeline.response_id = self._made.response_id
        elif self._recorder is not None:
            self._recorder.generation = generation

    @property
    def _renderer(self) -> StepsRenderer:
        assert self._made is not None
        return self._made

    async def _run(self, generation: Generation, number: int) -> AsyncGenerator[list[Piece], None]:
        settings = self._service.settings
        async with engaged(self._service, self._attempt, generation, further=number > 1) as account:
            wait = settings.hold_status_s if number == 1 else settings.keep_alive_s
            opened = account is None
            try:
                while not generation.all_shown:
                    pieces = await generation.shown(wait)
                    wait = settings.keep_alive_s
                    if account is not None:
                        if not opened:
                            await account.opened()
                            opened = True
                        account.note()
                    yield pieces
                if account is not None:
                    await account.ended(generation.outcome or "stop")
            finally:
                self._totals.add(generation)

    async def _call(
        self, calls: list[Call], step: int, generation: Generation
    ) -> AsyncGenerator[dict[str, Any] | list[Piece], None]:
        """Run the calls of a step side by side; an event for each when it begins and when it ends."""
        began = time.monotonic()
        tasks: dict[asyncio.Task[Outcome], int] = {}
        for index, call in enumerate(calls):
            task = asyncio.create_task(self._one(call, index, generation), name=f"tool {call.name}")
            tasks[task] = index
            self._running.add(task)
        results: dict[int, Outcome] = {}
        try:
            for call in calls:
                yield {"type": "tool_call", "step": step, "id": call.id, "name": call.name, "arguments": call.arguments}
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=self._service.settings.keep_alive_s, return_when=asyncio.FIRST_COMPLETED
                )
                self._check()
                for task in sorted(done, key=lambda task: tasks[task]):
                    index = tasks[task]
                    outcome = results[index] = task.result()
                    yield {
                        "type": "tool_result",
                        "step": step,
                        "id": calls[index].id,
                        "name": calls[index].name,
                        "ok": outcome.ok,
                        "content": outcome.text,
                        "milliseconds": round((time.monotonic() - began) * 1000, 1),
                    }
                if not done:
                    yield []
        finally:
            for task in tasks:
                task.cancel()
                self._running.discard(task)
            await asyncio.gather(*tasks, return_exceptions=True)
        self._said += [
            {"role": "tool", "tool_call_id": call.id, "content": results[index].text}
            for index, call in enumerate(calls)
        ]

    async def _one(self, call: Call, index: int, generation: Generation) -> Outcome:
        async with self._limit_parallel:
            offer = self._offers.get(call.name)
            at, began = time.time(), time.monotonic()
            try:
                arguments = _decoder.decode(call.arguments or "{}")
            except msgspec.DecodeError as error:
                outcome = Outcome(f"Error: the arguments are not a JSON object: {error}.", ok=False)
            else:
                if offer is None:
                    outcome = Outcome("Error: there is no such tool.", ok=False)
                elif index >= MAX_CALLS:
                    outcome = Outcome(f"Error: more than {MAX_CALLS} calls at once are not run.", ok=False)
                else:
                    outcome = await registry_of(self._service).call(offer, arguments)
            self._exchange.timeline.note(f"tool {call.name}", began)
            self._log(offer, outcome, at + index * 1e-6, time.monotonic() - began, generation)
            return outcome

    def _log(self, offer: Offer | None, outcome: Outcome, at: float, seconds: float, generation: Generation) -> None:
        """A call is a record of the request log like any other, under the id of its request."""
        service, exchange = self._service, self._exchange
        name = "unknown" if offer is None else offer.full_name
        service.metrics.context.tool_call(name, outcome.ok, seconds)
        record = RequestRecord(
            exchange.request_id,
            f"tool:{name}",
            at,
            status=200 if outcome.ok else 502,
            user_id=exchange.record.user_id,
            tenant=exchange.record.tenant,
            model_version=generation.model.base_name,
            adapter_id=generation.model.adapter or None,
            total_latency_ms=round(seconds * 1000, 3),
            finish_reason="stop" if outcome.ok else "error",
        )
        log_request(record)
        if service.request_log is not None:
            service.request_log.add(record)
