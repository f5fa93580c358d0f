"""Whether a model produces tokens: known from tokens for clients, or from a probe of one token."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict

from penstock.engine.request import Request, SamplingParams
from penstock.protocol.errors import ApiError
from penstock.routing.flights import PROBE_PRIORITY
from penstock.routing.registry import ServedModel

PROBE_FRESH_S = 2.0
PROBE_LIMIT_S = 10.0
_serial = itertools.count()


class Readiness:
    """Probes a model at most once per `PROBE_FRESH_S`, however often it is asked."""

    def __init__(self) -> None:
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._results: dict[str, tuple[float, str | None]] = {}

    async def problem(self, model: ServedModel) -> str | None:
        backend = model.backend
        if not backend.ready:
            return None if model.on_demand else "the engine is not up"
        if backend.state != "awake":
            return None  # it was put to sleep
        if backend.idle_s < PROBE_FRESH_S:
            return None  # it is producing tokens for clients
        async with self._locks[model.name]:
            at, problem = self._results.get(model.name, (float("-inf"), None))
            if time.monotonic() - at > PROBE_FRESH_S:
                problem = await self._probe(model)
                self._results[model.name] = (time.monotonic(), problem)
            return problem

    async def _probe(self, model: ServedModel) -> str | None:
        request = Request(
            f"ready:{next(_serial)}",
            [0],
            SamplingParams(max_tokens=1, temperature=0.0),
            priority=PROBE_PRIORITY,
            timeout_s=PROBE_LIMIT_S,
        )
        try:
            async with asyncio.timeout(PROBE_LIMIT_S):
                async for delta in model.backend.generate(request):
                    if delta.tokens:
                        return None
        except TimeoutError:
            return f"no token in {PROBE_LIMIT_S:g} s"
        except ApiError as error:
            return error.message if model.backend.state == "awake" else None
        return "the engine ended a probe without a token"
