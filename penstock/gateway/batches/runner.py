"""Runs batches: claims one, checks its input, answers its lines a few at a time, writes its files.

If this process dies, another gateway continues from the stored answers: a line is done when its answer is in the store,
and it is billed once, under a charge id made from the batch and its number. Lines run at the lowest priority; a line
that is refused for lack of capacity is retried until the completion window of the batch is over.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Literal

from penstock.gateway.accounting.batch_line import BatchLine
from penstock.gateway.app.dialects import ANTHROPIC, OPENAI
from penstock.gateway.app.exchange import IGNORED, Exchange, encode_json
from penstock.gateway.app.memory_request import Reply
from penstock.gateway.batches.files import FileStore
from penstock.gateway.batches.line_request import LineRequest
from penstock.gateway.batches.lines import Check, Problem, answered, numbered, read, unanswered
from penstock.gateway.batches.message_lines import MESSAGES, message_answered, message_unanswered
from penstock.gateway.batches.store import Answer, Batch, BatchStore
from penstock.gateway.batches.usage import usage_of
from penstock.identity import Caller
from penstock.protocol.errors import ApiError, AuthenticationError
from penstock.storage import DatabaseError, Statement
from penstock.telemetry.exposition import MetricRegistry

log = logging.getLogger(__name__)

AT_ONCE = 16
"""Batches that one gateway runs concurrently, so that a short one need not wait for a long one."""
PER_TENANT = 2
"""Batches of one tenant that one gateway runs concurrently."""
SWEEP_S = 600.0
LONGEST_PAUSE_S = 30.0
ATTEMPTS = 5
"""Attempts for a line on which the server fails; a line that finds no capacity is retried without this limit."""

Reason = Literal["cancelled", "expired", "held", "lost"]
FindCaller = Callable[[str, str], Awaitable[Caller]]
Answerer = Callable[[Exchange], Awaitable[None]]
_WHY: dict[str, tuple[str, str]] = {
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was answered."),
    "expired": ("batch_expired", "This request could not be answered before the completion window was over."),
}


class _Stop:
    """Why a batch ends early. `held`: running lines may finish; otherwise they are aborted."""

    def __init__(self) -> None:
        self.reason: Reason | None = None
        self.now = asyncio.Event()

    def asked(self) -> bool:
        return self.reason is not None

    def set(self, reason: Reason) -> None:
        if self.reason in (None, "held"):
            self.reason = reason
        if reason != "held":
            self.now.set()


class BatchRunner:
    """One per gateway process."""

    def __init__(
        self,
        batches: BatchStore,
        files: FileStore,
        caller: FindCaller,
        *,
        lines_at_once: int,
        most_lines: int,
        lease_s: float,
        metrics: MetricRegistry,
    ) -> None:
        self._answers = metrics.counter(
            "penstock_batch_lines_total", "Requests of batches, by outcome.", ("endpoint", "outcome")
        )
        self._tried_again = metrics.counter(
            "penstock_batch_retries_total",
            "Requests of batches that found no capacity or failed, and are retried.",
            ("endpoint",),
        )
        metrics.sampled(
            "gauge", "penstock_batches_running", "Batches that are running.", (), self._running_now, merge="sum"
        )
        self._batches = batches
        self._files = files
        self._answer: Answerer
        self._paths: frozenset[str] = frozenset()
        self._caller = caller
        self._most_lines = most_lines
        self._lease_s = lease_s
        self._lines_at_once = lines_at_once
        self._slots = asyncio.Semaphore(lines_at_once)
        self._name = uuid.uuid4().hex
        self._running: dict[str, tuple[asyncio.Task[None], _Stop]] = {}
        self._tenants: Counter[str] = Counter()
        self._wake = asyncio.Event()
        self._held = False
        self._task: asyncio.Task[None] | None = None

    def _running_now(self) -> list[tuple[tuple[str, ...], float]]:
        return [((), len(self._running))]

    def start(self, answer: Answerer, paths: Collection[str]) -> None:
        """Take part in running batches, unless no lines may run here (`lines_at_once` is 0), and in deleting old files.
        `answer` answers their requests, which may go to `paths`."""
        self._answer, self._paths = answer, frozenset(paths)
        self._task = asyncio.create_task(self._run(), name="batch runner")

    def serves(self, path: str) -> bool:
        """Whether requests of a batch may go to this path."""
        return path in self._paths

    def wake(self) -> None:
        """Look for work now: a batch was created or cancelled."""
        self._wake.set()

    def hold(self) -> None:
        """Start no further lines: the gateway drains."""
        self._held = True
        for _, stop in self._running.values():
            stop.set("held")

    async def close(self) -> None:
        self.hold()
        tasks = [task for task, _ in self._running.values()]
        if self._task is not None:
            tasks.append(self._task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        swept = float("-inf")
        while not self._held:
            try:
                if loop.time() - swept > SWEEP_S:
                    swept = loop.time()
                    await self._files.sweep()
                while (
                    self._lines_at_once and len(self._running) < AT_ONCE and (batch := await self._claim()) is not None
                ):
                    stop = _Stop()
                    task = asyncio.create_task(self._drive(batch, stop), name=batch.id)
                    self._running[batch.id] = (task, stop)
                    self._tenants[batch.tenant] += 1
                    task.add_done_callback(partial(self._ended, batch))
            except DatabaseError as error:
                log.warning("cannot read the batches: %s", error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._lease_s / 4)
            self._wake.clear()

    async def _claim(self) -> Batch | None:
        full = [tenant for tenant, count in self._tenants.items() if count >= PER_TENANT]
        return await self._batches.claim(self._name, self._lease_s, besides=list(self._running), not_of=full)

    def _ended(self, batch: Batch, task: asyncio.Task[None]) -> None:
        self._running.pop(batch.id, None)
        self._tenants[batch.tenant] -= 1
        if not self._tenants[batch.tenant]:
            del self._tenants[batch.tenant]
        self._wake.set()

    async def _drive(self, batch: Batch, stop: _Stop) -> None:
        """Run a batch and renew its lease meanwhile; when the store fails, a later claim continues the batch."""
        work = asyncio.create_task(self._work(batch, stop), name=f"{batch.id} work")
        try:
            while not (await asyncio.wait((work,), timeout=min(2.0, self._lease_s / 4)))[0]:
                status = await self._batches.renew(batch.id, self._name, self._lease_s)
                if status is None:
                    log.warning("%s: another gateway has taken over the batch", batch.id)
                    return
                if status == "cancelling":
                    stop.set("cancelled")
                elif status == "in_progress" and self._over(batch):
                    stop.set("expired")
            await work
        except DatabaseError as error:
            log.warning("%s: paused, the store failed: %s", batch.id, error)
        except Exception:
            log.exception("%s: failed, will be retried", batch.id)
        finally:
            stop.set("lost")
            work.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await work
            with suppress(DatabaseError):
                await self._batches.release(batch.id, self._name)

    def _over(self, batch: Batch) -> bool:
        return batch.expires_at is not None and self._batches.clock() >= batch.expires_at

    async def _work(self, batch: Batch, stop: _Stop) -> None:
        if batch.status == "cancelling":
            stop.set("cancelled")
        elif batch.status != "finalizing" and self._over(batch):
            stop.set("expired")
        if batch.status == "validating" and not await self._validate(batch):
            return
        if batch.status != "finalizing":
            await self._answer_lines(batch, stop)
        if stop.reason is None or stop.reason in ("cancelled", "expired"):
            await self._finish(batch, stop.reason)

    async def _validate(self, batch: Batch) -> bool:
        """Whether the input is valid; problems are stored with the batch."""
        if await self._files.get(batch.input_file_id, batch.tenant) is None:
            problems = [Problem("file_not_found", f"The file {batch.input_file_id} no longer exists.")]
        else:
            check = Check(batch.endpoint, self._most_lines)
            first = 1
            async for part in self._files.content(batch.input_file_id):
                await asyncio.to_thread(check.add, numbered(part, first))
                first += part.count("\n")
            problems = check.finish()
        if problems:
            await self._batches.failed(batch.id, self._name, problems)
            return False
        return await self._batches.begun(batch.id, self._name, check.count)

    async def _lines(self, batch: Batch) -> AsyncIterator[tuple[int, str]]:
        """The lines that have no answer yet."""
        done = await self._batches.answered(batch.id)
        first = 1
        async for part in self._files.content(batch.input_file_id):
            for number, text in numbered(part, first):
                if number not in done:
                    yield number, text
            first += part.count("\n")

    async def _answer_lines(self, batch: Batch, stop: _Stop) -> None:
        """Answer the lines. A line that waits for capacity delays its own batch and takes no slot from others."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            async for number, text in self._lines(batch):
                if len(tasks) >= self._lines_at_once:
                    done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                if stop.asked():
                    break
                line = self._answer_line(batch, number, text, stop)
                tasks.add(asyncio.create_task(line, name=f"{batch.id} {number}"))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _answer_line(self, batch: Batch, number: int, text: str, stop: _Stop) -> None:
        line = read(text)
        attempt = 0
        while not stop.asked():
            attempt += 1
            async with self._slots:
                if stop.asked():
                    return
                reply = await self._ask(batch, number, bytes(line.body), stop)
            if reply.status is None or stop.now.is_set():
                return
            pause = _pause(reply, attempt)
            if pause is None:
                written = message_answered if batch.endpoint == MESSAGES else answered
                ignored = reply.headers.get(IGNORED.decode())
                content = written(line.custom_id, reply.status, reply.request_id, reply.body, ignored)
                answer = Answer(number, reply.status == 200, content, usage=usage_of(reply.body))
                await self._batches.add([answer], batch.id)
                self._answers.child(batch.endpoint, "completed" if answer.ok else "failed").inc()
                return
            self._tried_again.child(batch.endpoint).inc()
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.now.wait(), pause)

    async def _ask(self, batch: Batch, number: int, body: bytes, stop: _Stop) -> Reply:
        try:
            caller = await self._caller(batch.tenant, batch.key)
        except AuthenticationError as error:
            id, dialect = f"req_{uuid.uuid4().hex}", ANTHROPIC if batch.endpoint == MESSAGES else OPENAI
            return Reply(id, error.status, {}, encode_json(dialect.error(error, id)))
        except ApiError as error:  # the key store is unavailable
            return Reply("", error.status, dict(error.headers()))
        request = LineRequest(batch.endpoint, body, BatchLine(batch.id, number), caller, stop.now, batch.require)
        await self._answer(request.exchange)
        return request.reply

    async def _finish(self, batch: Batch, why: Reason | None) -> None:
        if why is None and batch.status != "finalizing" and not await self._batches.finalizing(batch.id, self._name):
            return  # cancelled meanwhile, or the lease is lost: the next claim finds out
        if why is not None:
            await self._write_off(batch, *_WHY[why])
        statements: list[Statement] = []
        output = await self._compose(batch, True, statements)
        errors = await self._compose(batch, False, statements)
        status: Literal["completed", "expired", "cancelled"] = "completed"
        if why == "cancelled" or why == "expired":
            status = why
        await self._batches.finish(batch.id, self._name, status, output=output, errors=errors, with_files=statements)
        log.info("%s: %s", batch.id, status)

    async def _write_off(self, batch: Batch, code: str, message: str) -> None:
        """An entry in the error file for every line that has no answer."""
        answers: list[Answer] = []
        written = message_unanswered if batch.endpoint == MESSAGES else unanswered
        async for number, text in self._lines(batch):
            with suppress(ValueError):  # the batch was cancelled before its input was checked
                content = written(read(text).custom_id, code, message)
                answers.append(Answer(number, False, content, written_off=True))
            if len(answers) >= 500:
                await self._batches.add(answers, batch.id)
                answers = []
        await self._batches.add(answers, batch.id)

    async def _compose(self, batch: Batch, ok: bool, statements: list[Statement]) -> str | None:
        """Write a file of answers; returns its id, or None when there are none. Running `statements` publishes it."""
        page = await self._batches.answers(batch.id, ok=ok)
        if not page:
            return None
        name = f"{batch.id}_{'output' if ok else 'error'}.jsonl"
        writer = await self._files.begin(batch.tenant, name, "batch_output", user=batch.user)
        while page:
            await writer.add("".join(answer.content for answer in page))
            page = await self._batches.answers(batch.id, ok=ok, after=page[-1].line)
        statements.append(await writer.finished())
        return writer.file.id


def _pause(reply: Reply, attempt: int) -> float | None:
    """How long to wait before a line is retried; None when the reply is final."""
    status = reply.status or 500
    if status < 429 and status != 408:
        return None
    room = status in (429, 503)
    if reply.headers.get("x-should-retry") == "false" or (not room and attempt >= ATTEMPTS):
        return None
    told = reply.headers.get("retry-after", "")
    longer = min(0.5 * 2 ** min(attempt, 10), LONGEST_PAUSE_S)
    return min(float(told), LONGEST_PAUSE_S) if told.isdigit() else longer
