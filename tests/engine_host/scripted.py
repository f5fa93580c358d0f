"""An engine without a model: token k of a request is its prompt's first token plus k. For tests of what is around."""

import threading
import time
from collections.abc import Callable

from penstock.engine.request import Delta, EngineInfo, EngineLoad, Request, StepOutput


class ScriptedEngine:
    """One token per running request and step, as a real engine would; `before_step` may interfere."""

    def __init__(
        self, *, instance: str = "one", step_s: float = 0.0, before_step: Callable[[], None] | None = None
    ) -> None:
        self.info = EngineInfo("scripted", instance, 2048, 1000, 16, 100, 8, "none", "none", {"weights": 0.0})
        self.running: dict[str, tuple[Request, int]] = {}
        self.aborted: list[str] = []
        self.steps = 0
        self.paused = False
        """Its steps produce nothing, as long as that is so: what is asked meanwhile comes while it works."""
        self.pause_at: int | None = None
        """The number of steps after which it is paused."""
        self.thread: int | None = None
        self._step_s = step_s
        self._before_step = before_step
        self._final: list[Delta] = []

    def submit(self, request: Request) -> None:
        self.thread = threading.get_ident()
        self.running[request.request_id] = (request, len(request.produced))

    adapters = None

    def unload_adapter(self, name: str) -> None:
        raise AssertionError("there are no adapters")

    def abort(self, request_id: str) -> None:
        if self.running.pop(request_id, None) is not None:
            self.aborted.append(request_id)
            self._final.append(Delta(request_id, finish_reason="abort"))

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._final)

    def load_snapshot(self) -> EngineLoad:
        return EngineLoad(running=len(self.running), steps=self.steps)

    def step(self) -> StepOutput | None:
        if not self.has_work:
            return None
        time.sleep(self._step_s)
        if self.paused or self.steps == self.pause_at:
            time.sleep(0.001)
            return None
        if self._before_step is not None:
            self._before_step()
        self.steps += 1
        deltas, self._final = self._final, []
        for request_id, (request, produced) in list(self.running.items()):
            done = produced + 1 >= request.params.max_tokens
            first = request.prompt[0] if request.prompt else 0
            deltas.append(Delta(request_id, [first + produced], "length" if done else None))
            if done:
                del self.running[request_id]
            else:
                self.running[request_id] = (request, produced + 1)
        return StepOutput(deltas, self.load_snapshot())
