"""Server tools: the model answers, the gateway runs its calls, the model sees the results and answers again.

Every answer of the model is a generation of its own, with its own reservation and charge, so that what is billed is the
exact sum. The client sees one answer: text as it comes, calls and results as events beside it. The last step allowed
has no tools, so a loop always ends in text. A failing tool is reported to the model, not to the client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from penstock.config.context import ToolsConfig
from penstock.conversations import Message
from penstock.gateway.app.data_rules import permit, withheld
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.assistant_message import AssembledCall
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.choice import Piece
from penstock.gateway.generation.pipeline import GenerationPipeline
from penstock.gateway.generation.response import EndingLimit, ending, note_limit, send_failure
from penstock.gateway.generation.sampling import TokenLimit
from penstock.gateway.generation.schemas import (
    ChatRequest,
)
from penstock.gateway.generation.tool_schemas import (
    FunctionDefinition,
    ToolDefinition,
)
from penstock.gateway.generation.turn import Turn, TurnRecorder
from penstock.gateway.server_tools.steps import StepMessage, StepsRenderer, StepTotals, shown
from penstock.protocol.errors import ApiError, DataRuleForbids, InvalidRequest, sentence
from penstock.telemetry.logging import RequestRecord, log_request
from penstock.tools.execution import Offer, Outcome, ToolError, ToolRegistry
from penstock.tools.toolbox import MAX_CALLS

_decoder = msgspec.json.Decoder(dict[str, Any])


Render = Callable[[Generation, TurnRecorder, StepTotals], StepsRenderer]


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
        loop = _ToolLoop(self, attempt, request, limit, turn, await self._offers(exchange, request), render)
        with exchange.watched(loop.fail):
            if request.stream:
                await loop.stream()
            else:
                await loop.whole()
        if loop.generation is not None:
            self.pipeline.grader.submit(attempt, loop.generation)

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


class _ToolLoop:
    """The steps of one request."""

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
        self._tools = tools
        self._pipeline = tools.pipeline
        self._settings = tools.pipeline.settings
        self._render = render
        self._made: tuple[StepsRenderer, TurnRecorder] | None = None
        self._has_shown_text = False
        """The text of the next step then begins a new paragraph."""
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
        """Answers, calls and results so far, as messages."""
        self._totals = StepTotals()
        self._capped_rounds = self._out_of_rounds = False
        """Whether the caller may use fewer rounds than configured, and whether they were used up."""
        self._error: Exception | None = None
        self.generation: Generation | None = None
        self._running: set[asyncio.Task[Outcome]] = set()
        self._limit_parallel = asyncio.Semaphore(tools.config.max_parallel)

    def fail(self, error: Exception) -> None:
        """The client left: abort everything that runs for it."""
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
        renderer, recorder = self._answer
        if ended := self._limit_reached():
            self._exchange.extra_headers += ended.headers()
        body = renderer.whole([pieces])
        await recorder.store(self._said)
        await renderer.keep()
        await self._exchange.reply(200, body)

    async def stream(self) -> None:
        exchange, waiting = self._exchange, b""
        try:
            async with aclosing(self._steps()) as steps:
                async for found in steps:
                    data = b""
                    if not exchange.response_started:
                        await exchange.start_stream()
                        data = self._answer[0].opening()
                    renderer, _ = self._answer
                    if isinstance(found, dict):
                        data += renderer.tool_event(found)
                    else:
                        data += b"".join(map(renderer.event, found))
                    if isinstance(found, list) and any(piece.finish_reason for piece in found):
                        waiting = data  # the end is not sent before it is settled and stored
                    else:
                        await exchange.write(data or renderer.keep_alive)
            renderer, recorder = self._answer
            await recorder.store(self._said)
            if ended := self._limit_reached():
                waiting += renderer.limit_reached(*ended)
            waiting += renderer.closing()
            await renderer.keep()
            await exchange.end_stream(waiting)
        except ApiError as error:
            if not exchange.response_started:
                raise
            await send_failure(exchange, self._answer[0], error, self._pipeline.metrics, before=waiting)

    def _limit_reached(self) -> EndingLimit | None:
        if self.generation is None:
            return None
        ended = note_limit(self._exchange, self.generation)
        if ended is None and self._out_of_rounds:
            return ending(self._exchange, self.generation, "tool_rounds")
        return ended

    def _most_steps(self) -> int:
        """Answers of the model: one more than the rounds of calls that the caller may use."""
        most, pipeline = self._tools.config.max_steps, self._pipeline
        name = pipeline.registry.base_name(self._request.model)
        cap = pipeline.quotas.requests.noted(self._exchange, "tool_rounds", name)
        if cap is None or cap.most + 1 >= most:
            return most
        if cap.most == 0 and self._offers:
            raise cap.refusal("`server_tools` names tools", "rounds of tool calls", "server_tools")
        self._capped_rounds = True
        return cap.most + 1

    async def _steps(self) -> AsyncGenerator[list[Piece] | dict[str, Any], None]:
        """What the client sees, in order: pieces of text and events of calls. An empty list: nothing new for a
        while."""
        most = self._most_steps()
        for number in range(1, most + 1):
            generation = await self._prepared(number, last=number == most)
            step = StepMessage()
            apart = self._has_shown_text
            async with aclosing(self._run(generation, number)) as running:
                async for pieces in running:
                    seen = []
                    for piece in pieces:
                        step.add(piece)
                        if (visible := shown(piece)) is not None:
                            if visible.text and apart:
                                visible.text, apart = f"\n\n{visible.text}", False
                            self._has_shown_text = self._has_shown_text or bool(visible.text)
                            seen.append(visible)
                    if seen or not pieces:
                        yield seen
            said = step.body()
            if not step.has_calls_to_run:
                self._out_of_rounds = self._capped_rounds and number == most
                said.pop("tool_calls", None)
                said.pop("reasoning_content", None)
                self._said.append(said)
                return
            self._said.append(said)
            self._attempt.committed = True
            self._exchange.record.finish_reason = None
            async with aclosing(self._call(step.calls, number, generation)) as running_calls:
                async for event in running_calls:
                    yield event

    async def _prepared(self, number: int, *, last: bool) -> Generation:
        """The model's next answer. `tool_choice` holds for the first answer only; the last one has no tools."""
        exchange, request = self._exchange, self._request
        self._check()
        if last:
            request = msgspec.structs.replace(request, tools=None, tool_choice=None, parallel_tool_calls=None)
        elif number > 1:
            request = msgspec.structs.replace(request, tool_choice=None)
        self._attempt.release()
        headers = len(exchange.extra_headers)
        generation = await self._pipeline.chat(self._attempt, request, self._limit, self._turn, following=self._said)
        if number > 1:
            del exchange.extra_headers[headers:]
        self._pipeline.content_filter.watch(exchange, generation)
        self.generation = generation
        if self._made is None:
            recorder = self._turn.recorder(self._attempt, generation)
            renderer = self._render(generation, recorder, self._totals)
            self._made = renderer, recorder
            exchange.timeline.response_id = renderer.response_id
        else:
            self._made[1].generation = generation
        return generation

    @property
    def _answer(self) -> tuple[StepsRenderer, TurnRecorder]:
        """Writes and stores the answer; there from the first step on."""
        assert self._made is not None
        return self._made

    async def _run(self, generation: Generation, number: int) -> AsyncGenerator[list[Piece], None]:
        settings = self._settings
        async with self._pipeline.lifecycle.running(self._attempt, generation, further=number > 1) as account:
            wait = settings.hold_status_s if number == 1 else settings.keep_alive_s
            opened = False
            try:
                while not generation.all_shown:
                    pieces = await generation.shown(wait)
                    wait = settings.keep_alive_s
                    if not opened:
                        generation.commit()
                        await account.opened()
                        opened = True
                    account.note()
                    yield pieces
                await account.ended(generation.outcome or "stop")
            finally:
                self._totals.add(generation)

    async def _call(
        self, calls: list[AssembledCall], step: int, generation: Generation
    ) -> AsyncGenerator[dict[str, Any] | list[Piece], None]:
        """Run the calls of a step in parallel; yields an event when each begins and when it ends."""
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
                    pending, timeout=self._settings.keep_alive_s, return_when=asyncio.FIRST_COMPLETED
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

    async def _one(self, call: AssembledCall, index: int, generation: Generation) -> Outcome:
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
                    outcome = await self._permitted_call(offer, arguments, call.arguments or "")
            self._exchange.timeline.note(f"tool {call.name}", began)
            self._log(offer, outcome, at + index * 1e-6, time.monotonic() - began, generation)
            return outcome

    async def _permitted_call(self, offer: Offer, arguments: dict[str, Any], text: str) -> Outcome:
        """Run a call, if its server may have what the model says; results and arguments may have marked the request."""
        exchange, registry = self._exchange, self._tools.registry
        await self._pipeline.content_filter.mark(exchange, lambda: [text])
        if exchange.demand:
            try:
                permit(exchange, "tool", offer.server, registry.unmet(offer.server, exchange.demand))
            except DataRuleForbids as error:
                return Outcome(f"Error: {error.message}", ok=False)
        return await registry.call(offer, arguments)

    def _log(self, offer: Offer | None, outcome: Outcome, at: float, seconds: float, generation: Generation) -> None:
        """Every call is a record of the request log, under the id of its request."""
        exchange = self._exchange
        name = "unknown" if offer is None else offer.full_name
        self._pipeline.metrics.context.tool_call(name, outcome.ok, seconds)
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
        self._tools.log_call(record)
