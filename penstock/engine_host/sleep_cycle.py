"""The states of an engine that can be put to sleep: awake, drowsy (sleeps once it is idle), sleeping, waking."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from penstock.engine.request import EngineInfo, EngineState
from penstock.engine_host.interfaces import EngineLike, Sleeper
from penstock.protocol.messages import State

log = logging.getLogger("penstock.engine")


class SleepCycle:
    """Every request for another state is answered with `tell`, which reaches all gateways."""

    def __init__(self, sleeper: Sleeper | None, state: EngineState, tell: Callable[[State], None]) -> None:
        """`sleeper`: None where the engine cannot sleep."""
        self.state = state
        self._sleeper = sleeper
        self._tell = tell

    def ask_to_sleep(self, info: EngineInfo) -> None:
        """Sleep when running requests have finished, which may be now."""
        if self._sleeper is None:
            self._become(self.state, info, "this engine cannot sleep")
        else:
            self._become("drowsy" if self.state == "awake" else self.state, info)

    def put_to_sleep(self, engine: EngineLike) -> EngineLike:
        """Returns what stands in for the engine. Once nothing refers to the engine any more, call `asleep`."""
        assert self._sleeper is not None
        return self._sleeper.sleep(engine)

    def asleep(self, info: EngineInfo) -> None:
        assert self._sleeper is not None
        self._sleeper.collect()
        self._become("sleeping", info)

    def wake(self, engine: EngineLike) -> EngineLike:
        """Returns the engine that runs from now on: `engine` itself if there is nothing to wake, or if that fails."""
        if self.state == "drowsy":
            self._become("awake", engine.info)
            return engine
        if self.state == "awake" or self._sleeper is None:
            self._become(self.state, engine.info)
            return engine
        self._become("waking", engine.info)
        begin = time.monotonic()
        try:
            woken = self._sleeper.wake(engine)
        except Exception as error:
            log.exception("the engine could not be woken")
            self._become("sleeping", engine.info, f"it could not be woken: {error}")
            return engine
        log.info("awake after %.1f s", time.monotonic() - begin)
        self._become("awake", woken.info)
        return woken

    def _become(self, state: EngineState, info: EngineInfo, problem: str = "") -> None:
        self.state = state
        self._tell(State(state, info, problem))
