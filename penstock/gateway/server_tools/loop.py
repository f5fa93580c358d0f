"""Server tools: the model answers, the gateway runs its calls, the model sees the results and answers again.

Every answer of the model is a generation of its own, with its own reservation and charge, so that what is billed is the
exact sum. The client sees one answer: text as it comes, calls and results as events beside it. The last step allowed
has no tools, so a loop always ends in text. A failing tool is reported to the model, not to the client.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from penstock.config.context import ToolsConfig
from penstock.conversations import Message
from penstock.gateway.accounting.request_limits import Cap
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
from penstock.gateway.generation.turn import Turn, TurnRecorder
from penstock.gateway.server_tools.steps import StepMessage, StepsRenderer, StepTotals, shown
from penstock.protocol.errors import ApiError
from penstock.telemetry.logging import RequestRecord, log_request
from penstock.tools.execution import Outcome
from penstock.tools.toolbox import MAX_CALLS

_decoder = msgspec.json.Decoder(dict[str, Any])


Render = Callable[[Generation, TurnRecorder, StepTotals], StepsRenderer]


class LoopParts(Protocol):
    """What every loop works with."""

    @property
    def pipeline(self) -> GenerationPipeline: ...
    @property
    def config(self) -> ToolsConfig: ...
    @property
    def log_call(self) -> Callable[[RequestRecord], None]:
        """Takes the record of a call to the request log."""


class ToolLoop(ABC):
    """The steps of one request."""

    one_text = True
    """Whether the client sees the texts of all steps as one."""

    def __init__(
        self,
        parts: LoopParts,
        attempt: Attempt,
        request: ChatRequest,
        limit: TokenLimit,
        turn: Turn,
        render: Render,
    ) -> None:
        """`request`: with the functions that the model may call."""
        self._parts = parts
        self._pipeline = parts.pipeline
        self._settings = parts.pipeline.settings
        self._render = render
        self._made: tuple[StepsRenderer, TurnRecorder] | None = None
        self._has_shown_text = False
        """The text of the next step then begins a new paragraph."""
        self._attempt = attempt
        self._exchange = attempt.exchange
        self._limit = limit
        self._turn = turn
        self._request = request
        self._said: list[Message] = []
        self._totals = StepTotals()
        self._capped_rounds = self._out_of_rounds = False
        """Whether the caller may use fewer rounds than configured, and whether they were used up."""
        self._error: Exception | None = None
        self.generation: Generation | None = None
        self._running: set[asyncio.Task[Outcome]] = set()
        self._limit_parallel = asyncio.Semaphore(parts.config.max_parallel)

    async def run(self, *, stream: bool) -> None:
        with self._exchange.watched(self.fail):
            if stream:
                await self.stream()
            else:
                await self.whole()
        if self.generation is not None:
            self._pipeline.grader.submit(self._attempt, self.generation)

    @property
    def said(self) -> list[Message]:
        """Answers, calls and results so far, as messages; it grows."""
        return self._said

    @abstractmethod
    async def _outcome(self, call: AssembledCall, arguments: dict[str, Any], generation: Generation) -> Outcome:
        """Run a call. A failure is told to the model."""

    @abstractmethod
    def _label(self, name: str) -> str:
        """What metrics and the request log call a function."""

    def _runs(self, name: str) -> bool:
        """Whether the gateway runs a function; others are the client's."""
        return True

    def _seen(self, piece: Piece) -> Piece | None:
        """What the client sees of a piece."""
        return shown(piece)

    def _narrowed(self, request: ChatRequest, *, last: bool) -> ChatRequest:
        """The request of a step after the first, or of the last."""
        if last:
            return msgspec.structs.replace(request, tools=None, tool_choice=None, parallel_tool_calls=None)
        return msgspec.structs.replace(request, tool_choice=None)

    def _refusal(self, cap: Cap) -> ApiError:
        """For a caller who may use no rounds of calls at all."""
        return cap.refusal("`server_tools` names tools", "rounds of tool calls", "server_tools")

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
        most, pipeline = self._parts.config.max_steps, self._pipeline
        name = pipeline.registry.base_name(self._request.model)
        cap = pipeline.quotas.requests.noted(self._exchange, "tool_rounds", name)
        if cap is None or cap.most + 1 >= most:
            return most
        if cap.most == 0 and self._request.tools:
            raise self._refusal(cap)
        self._capped_rounds = True
        return cap.most + 1

    async def _steps(self) -> AsyncGenerator[list[Piece] | dict[str, Any], None]:
        """What the client sees, in order: pieces of text and events of calls. An empty list: nothing new for a
        while."""
        most = self._most_steps()
        for number in range(1, most + 1):
            generation = await self._prepared(number, last=number == most)
            step = StepMessage()
            apart = self.one_text and self._has_shown_text
            async with aclosing(self._run(generation, number)) as running:
                async for pieces in running:
                    seen = []
                    for piece in pieces:
                        step.add(piece)
                        if (visible := self._seen(piece)) is not None:
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
            self._attempt.committed = self._exchange.answering = True
            self._exchange.record.finish_reason = None
            mine = [call for call in step.calls if self._runs(call.name)]
            async with aclosing(self._call(mine, number, generation)) as running_calls:
                async for event in running_calls:
                    yield event
            if len(mine) < len(step.calls):  # the client has to run the others before the model goes on
                self._exchange.record.finish_reason = "tool_calls"
                yield [Piece(index=0, finish_reason="tool_calls")]
                return

    async def _prepared(self, number: int, *, last: bool) -> Generation:
        """The model's next answer. `tool_choice` holds for the first answer only; the last one has no tools."""
        exchange, request = self._exchange, self._request
        self._check()
        if last or number > 1:
            request = self._narrowed(request, last=last)
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
            self._made[0].follow(generation)
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
            if number == 1 and (admitted := self._answer[0].admitted) is not None:
                await admitted()
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
            at, began = time.time(), time.monotonic()
            try:
                arguments = _decoder.decode(call.arguments or "{}")
            except (msgspec.DecodeError, RecursionError) as error:
                outcome = Outcome(f"Error: the arguments are not a JSON object: {error}.", ok=False)
            else:
                if index >= MAX_CALLS:
                    outcome = Outcome(f"Error: more than {MAX_CALLS} calls at once are not run.", ok=False)
                else:
                    outcome = await self._outcome(call, arguments, generation)
            self._exchange.timeline.note(f"tool {call.name}", began)
            self._log(self._label(call.name), outcome, at + index * 1e-6, time.monotonic() - began, generation)
            return outcome

    def _log(self, name: str, outcome: Outcome, at: float, seconds: float, generation: Generation) -> None:
        """Every call is a record of the request log, under the id of its request."""
        exchange = self._exchange
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
        self._parts.log_call(record)
