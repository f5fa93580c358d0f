"""Health checks: /health/live and /health/ready, and the shorter /health, /ping, /version and / that clients of other
servers ask for.

Live: this process answers, and no engine has had work for a long time without completing a step (its own watchdog
should have restarted it by then, so only a restart of everything can help). Ready: each model has produced a token
within the last seconds, for a client or, when there was no request, for a probe of one token, and nothing else refuses
every request: the database, the ledger, the limits, a guardrail. Anybody may ask, so models are named only to callers
for whom they exist: where there are keys, to nobody without one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import penstock
from penstock.gateway.api.operations.readiness import Readiness
from penstock.gateway.app.authentication import OpenAuthentication
from penstock.gateway.app.drain import Drain
from penstock.gateway.app.exchange import Exchange, encode_json
from penstock.protocol.errors import Draining
from penstock.routing.registry import ModelRegistry, ServedModel

STUCK_S = 180.0
TEXT = b"text/plain; charset=utf-8"
Check = Callable[[], Awaitable[str | None]]
"""Why everything is refused at the moment; None: it is not."""


class HealthEndpoints:
    """Health checks."""

    def __init__(
        self,
        registry: ModelRegistry,
        authentication: OpenAuthentication,
        drain: Drain,
        checks: Mapping[str, Check],
    ) -> None:
        """`checks`: what else every request needs, by name."""
        self._registry = registry
        self._authentication = authentication
        self._drain = drain
        self._checks = {**checks, "models": self._all_asleep}
        self._readiness = Readiness()

    async def live(self, exchange: Exchange) -> None:
        shown = await self._shown(exchange)
        models = {model.name: {"stalled_s": round(model.backend.stalled_s, 3)} for model in shown}
        stuck = any(model.backend.stalled_s > STUCK_S for model in self._registry)
        body = {"status": "stuck" if stuck else "ok", "models": models}
        await exchange.reply(503 if stuck else 200, encode_json(body))

    async def ready(self, exchange: Exchange) -> None:
        if self._drain.leaving:
            raise Draining
        models = list(self._registry)
        found = await asyncio.gather(
            *(check() for check in self._checks.values()), *(self._readiness.problem(model) for model in models)
        )
        problems = found[len(self._checks) :]
        shown = await self._shown(exchange)
        states = {model.name: _state(model, problem) for model, problem in zip(models, problems, strict=True)}
        body = {
            "status": "unavailable" if any(found) else "ok",
            "checks": dict(zip(self._checks, found, strict=False)),
            "models": {model.name: states[model.name] for model in shown if model.name in states},
            "ready_models": sum(problem is None for problem in problems),
        }
        headers = [(b"retry-after", b"1")] if any(found) else []
        await exchange.reply(503 if any(found) else 200, encode_json(body), headers=headers)

    async def _shown(self, exchange: Exchange) -> list[ServedModel]:
        """The models that exist for whoever asks."""
        caller = await self._authentication.identified(exchange)
        if caller is None:
            return []
        operator = "admin" in caller.scopes
        return [model for model in self._registry if operator or model.allowed(caller.access)]

    async def health(self, exchange: Exchange) -> None:
        """200 when this server takes requests and at least one model can answer; cheap, so it may be asked often."""
        if self._drain.leaving:
            raise Draining
        models = list(self._registry)
        stuck = any(model.backend.stalled_s > STUCK_S for model in models)
        answers = any(model.backend.ready or model.on_demand for model in models)
        # Without any model the server may serve encoders only; a fleet that has no engine yet cannot answer.
        answers = (
            answers
            or (not models and "fleet" not in self._checks)
            or any(remote.ready for remote in self._registry.remotes.values())
        )
        well = answers and not stuck
        body = {"status": "ok" if well else "unavailable"}
        headers = [] if well else [(b"retry-after", b"1")]
        await exchange.reply(200 if well else 503, encode_json(body), headers=headers)

    async def ping(self, exchange: Exchange) -> None:
        await self.health(exchange)

    async def version(self, exchange: Exchange) -> None:
        await exchange.reply_json({"version": penstock.__version__})

    async def root(self, exchange: Exchange) -> None:
        """Clients ask for `/` to see whether anything listens; browsers are sent to the console."""
        await exchange.reply(200, b"Penstock is running. Its endpoints are listed at /docs.\n", TEXT)

    async def _all_asleep(self) -> str | None:
        """A model that an operator put to sleep is no problem as long as another one answers."""
        models = list(self._registry)
        if not models or self._registry.remotes:
            return None
        if all(model.backend.ready and model.backend.state != "awake" and not model.time_slice for model in models):
            return "every model was put to sleep; wake one with POST /v1/admin/models/NAME/wake"
        return None


def _state(model: ServedModel, problem: str | None) -> dict[str, Any]:
    load = model.backend.load
    return {
        "ready": problem is None,
        "state": model.state,
        "problem": problem,
        "running": load.running,
        "waiting": load.waiting,
        "stalled_s": round(model.backend.stalled_s, 3),
    }
