"""/v1/admin/experiments: the arms of experiments side by side; promote a canary, roll it back."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from penstock.gateway.app.decoding import decode
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.experiments import Experiments

Why = Annotated[str, Meta(max_length=1000)]


class Promotion(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/admin/experiments/{experiment}/promote"""

    arm: Annotated[str, Meta(max_length=256)] | None = None
    to: Annotated[float, Meta(ge=0, le=1)] = 1.0
    why: Why = ""


class Rollback(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/admin/experiments/{experiment}/rollback"""

    arm: Annotated[str, Meta(max_length=256)] | None = None
    why: Why = ""


_promotion = msgspec.json.Decoder(Promotion)
_rollback = msgspec.json.Decoder(Rollback)


class ExperimentEndpoints:
    """Experiments and their changes."""

    def __init__(self, experiments: Experiments, body_limit: int) -> None:
        self._experiments = experiments
        self._body_limit = body_limit

    async def list_experiments(self, exchange: Exchange) -> None:
        keeper = self._experiments.keeper
        data = [await keeper.report(experiment.config.name) for experiment in self._experiments]
        await exchange.reply_json({"object": "list", "data": data})

    async def show_experiment(self, exchange: Exchange) -> None:
        await exchange.reply_json(await self._experiments.keeper.report(_name(exchange)))

    async def promote_arm(self, exchange: Exchange) -> None:
        asked: Promotion = decode(_promotion, await exchange.body(self._body_limit) or b"{}")
        keeper, name = self._experiments.keeper, _name(exchange)
        await keeper.promote(name, asked.arm, asked.to, _who(exchange), asked.why)
        await exchange.reply_json(await keeper.report(name))

    async def roll_back_arm(self, exchange: Exchange) -> None:
        asked: Rollback = decode(_rollback, await exchange.body(self._body_limit) or b"{}")
        keeper, name = self._experiments.keeper, _name(exchange)
        await keeper.rollback(name, asked.arm, _who(exchange), asked.why)
        await exchange.reply_json(await keeper.report(name))


def _name(exchange: Exchange) -> str:
    params: dict[str, Any] = exchange.scope["path_params"]
    return str(params["experiment"])


def _who(exchange: Exchange) -> str:
    """For the list of changes: the key, never its secret."""
    caller = exchange.caller
    return f"{caller.user or caller.tenant} ({caller.key})" if caller.key else "operator"
