"""An engine on a thread of this process, behind the interface of the ZeroMQ client.

Only that thread touches the engine. Requests reach it through a queue; step outputs come back by
`call_soon_threadsafe`. torch is imported only when `load_engine` is called.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable

from penstock.backends.base import Clock, EngineClient, monotonic
from penstock.engine.config import EngineConfig
from penstock.engine.request import Request, StepOutput
from penstock.engine_host.adapters import operate
from penstock.engine_host.erasures import Erasures
from penstock.engine_host.interfaces import BeginsPrompts, EngineLike
from penstock.protocol.errors import EngineLost, InvalidRequest
from penstock.protocol.messages import AdapterOperation, Erase, Erased, Sleep, Wake
from penstock.sources.adapters import resolve_adapter
from penstock.text.vocabulary import grammars_of

log = logging.getLogger(__name__)


class InProcessBackend(EngineClient):
    """Runs `engine` on its own thread between `start` and `close`."""

    def __init__(
        self,
        engine: EngineLike,
        *,
        name: str = "0",
        heartbeat_s: float = 0.5,
        max_in_flight: int = 16384,
        clock: Clock = monotonic,
    ) -> None:
        super().__init__(name, max_in_flight=max_in_flight, max_waiters=max_in_flight, clock=clock)
        self._engine = engine
        self._heartbeat_s = heartbeat_s
        self._inbox: queue.SimpleQueue[Request | str | AdapterOperation | Erase | None] = queue.SimpleQueue()
        self._erased: dict[str, asyncio.Future[Erased]] = {}
        self._thread: threading.Thread | None = None

    @classmethod
    def load_engine(
        cls, config: EngineConfig, progress: Callable[[str, float], None] | None = None, *, name: str = "0"
    ) -> InProcessBackend:
        from penstock.engine.core import Engine

        return cls(
            Engine.load(config, progress, grammars=grammars_of(config.model), find_adapter=resolve_adapter), name=name
        )

    @property
    def tells_begun(self) -> bool:
        return isinstance(self._engine, BeginsPrompts)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name=f"engine {self.name}", daemon=True)
        self._thread.start()
        self._came_up(self._engine.info)

    async def close(self) -> None:
        if self._thread is None:
            return
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)
        self._thread = None
        self._went_down(EngineLost("The engine is being closed."))

    def _send_submit(self, request: Request) -> None:
        self._inbox.put(request)

    def _send_abort(self, request_id: str, resumable: bool = False) -> None:
        self._inbox.put(request_id)

    def _send_state(self, message: Sleep | Wake) -> None:
        raise InvalidRequest("An engine inside the gateway's own process cannot sleep.")

    def _send_operation(self, operation: AdapterOperation) -> None:
        self._inbox.put(operation)

    async def erase(self, owner: str) -> dict[str, Erased]:
        question = Erase(self._next_operation(), owner)
        answer = self._erased[question.question] = asyncio.get_running_loop().create_future()
        self._inbox.put(question)
        try:
            return {self.name: await answer}
        finally:
            del self._erased[question.question]

    def _finish_erasure(self, erased: Erased) -> None:
        self._erased[erased.question].set_result(erased)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        def tell(callback: Callable[..., None], *args: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(callback, *args)

        engine, revision, erasures = self._engine, -1, Erasures()
        if isinstance(engine, BeginsPrompts):
            engine.on_begun = lambda request_ids: tell(self.on_begun, request_ids)
        try:
            while True:
                try:
                    message = self._inbox.get(
                        block=not engine.has_work and not erasures.open, timeout=self._heartbeat_s
                    )
                    while True:
                        if message is None:
                            return
                        if isinstance(message, Request):
                            engine.submit(message)
                        elif isinstance(message, str):
                            engine.abort(message)
                        elif isinstance(message, Erase):
                            question, owner = message.question, message.owner
                            erasures.begin(engine, question, owner, lambda done: tell(self._finish_erasure, done))
                        else:
                            operate(engine, message, lambda result: tell(self._finish_operation, result))
                        message = self._inbox.get_nowait()
                except queue.Empty:
                    pass
                output = engine.step() or StepOutput([], engine.load_snapshot())
                tell(self._deliver, output)
                erasures.advance()
                if engine.adapters is not None and engine.adapters.revision != revision:
                    revision = engine.adapters.revision
                    tell(self._tell_adapters, engine.adapters.statuses())
        except Exception:
            log.exception("engine failed", extra={"engine": self.name})
            tell(self._went_down, EngineLost("The engine failed; see the server's log."))
