"""The life of an engine process: listen, load the engine, serve it until a signal or a failure ends it.

Invariant: the endpoint is bound before anything is loaded, so that one which cannot be used fails at once. Progress and
readiness are reported through callbacks; what supervises the process is not known here.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from penstock.engine.process import age_s, waited_s
from penstock.engine_host import head_start
from penstock.engine_host.pacer import Pacing, pick_interval
from penstock.engine_host.rank_hub import RankHub
from penstock.engine_host.server import EngineServer
from penstock.engine_host.watchdog import Watchdog
from penstock.protocol.transport import CurveServer, Listener

if TYPE_CHECKING:
    from penstock.engine.config import EngineConfig
    from penstock.engine.core import Engine
    from penstock.engine.encoder.config import EncoderEngineConfig
    from penstock.engine.grammar.constraints import MakeCompiler
    from penstock.engine.request import EngineInfo

log = logging.getLogger("penstock.engine")


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """What every engine process has in common, whichever engine it runs. Its methods return the exit code."""

    endpoint: str
    curve: CurveServer | None
    drain_s: float
    """How long running requests may take to finish after SIGTERM."""
    progress: Callable[[str, float], None]
    """Told the phase of loading, and the fraction of it that is done."""
    serving: Callable[[EngineInfo, str], AbstractContextManager[None]]
    """Entered when the engine is ready, with the endpoint that it listens on; left when it stops."""
    draining: Callable[[], None] = lambda: None
    """Called in a signal handler, before it drains."""

    def run_generator(
        self,
        config: EngineConfig,
        *,
        grammars: MakeCompiler,
        find_adapter: Callable[[str], Path],
        watchdog_s: float,
        stream_interval_s: float | None = None,
        start_asleep: bool = False,
        machines: Callable[[], RankHub] | None = None,
    ) -> int:
        """Serve a model that generates. `start_asleep`: load it when it is woken, because other models that share the
        device may have the memory now. `machines`: meets those that ranks are placed on, for each loading."""
        with Listener(self.endpoint, curve=self.curve) as listener:
            self.progress("import", 0.0)
            waited = waited_s()
            started, begin = max(age_s() - waited, 0.0), time.perf_counter()
            if not start_asleep:
                head_start.begin(config)
            from penstock.engine.core import Engine
            from penstock.engine.sleep.sleep import EngineSleep
            from penstock.engine_host.gpu_meter import open_meter

            imported = round(time.perf_counter() - begin, 3)

            def load(config: EngineConfig) -> Engine:
                hub = None if machines is None else machines()
                try:
                    engine = Engine.load(
                        config, self.progress, grammars=grammars, find_adapter=find_adapter, machines=hub
                    )
                except BaseException:
                    if hub is not None:
                        hub.close()
                    raise
                engine.meter = open_meter(engine.info.device, engine.info.ranks)
                if engine.ranks is not None:
                    engine.ranks.watch(lambda why: server.fail(why))
                return engine

            sleeper = EngineSleep(config, load)
            first = sleeper.not_loaded() if start_asleep else load(config)
            info = first.info
            before = {"start": round(started, 3)} | ({"wait": round(waited, 3)} if waited else {})
            phases = {**before, "import": imported, **info.startup}
            info.startup.clear()
            info.startup.update(phases)
            server = EngineServer(
                first,
                listener,
                sleeper=sleeper,
                state="sleeping" if start_asleep else "awake",
                watchdog=Watchdog(watchdog_s),
                pacing=Pacing(pick_interval(stream_interval_s, info.device)),
            )
            del first  # only the server may refer to it, so that its memory is freed when it goes to sleep
            log.info("serving %s on %s", info.model, listener.endpoint)
            return self._serve(server, info, listener.endpoint)

    def run_encoder(self, find: Callable[[], EncoderEngineConfig], *, watchdog_s: float) -> int:
        """Serve an encoder. `find` may download its model first: encoders are started when a request needs them."""
        with Listener(self.endpoint, curve=self.curve) as listener:
            config = find()
            self.progress("import", 0.0)
            from penstock.engine.encoder.core import EncoderEngine

            engine = EncoderEngine.load(config, self.progress)
            server = EngineServer(engine, listener, watchdog=Watchdog(watchdog_s))
            log.info("encoding with %s on %s", engine.info.model, listener.endpoint)
            return self._serve(server, engine.info, listener.endpoint)

    def _serve(self, server: EngineServer, info: EngineInfo, endpoint: str) -> int:
        self._stop_on_signals(server)
        with self.serving(info, endpoint):
            return server.run()

    def _stop_on_signals(self, server: EngineServer) -> None:
        """The first signal drains, the second stops at once."""
        asked = False

        def on_signal(number: int, frame: FrameType | None) -> None:
            nonlocal asked
            if asked:
                server.stop("told to stop at once", at_once=True)
            asked = True
            self.draining()
            server.drain(self.drain_s)

        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)
