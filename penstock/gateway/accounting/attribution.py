"""Who a request is for and which model answers it, as the request's record and the reply's headers say it."""

from __future__ import annotations

from penstock.gateway.app.exchange import Exchange


def identify(exchange: Exchange, user: str | None, metadata: dict[str, str] | None) -> None:
    """Record the user of a request. A key that belongs to a user decides; otherwise the request may name one."""
    exchange.record.user_id = exchange.caller.user or user
    exchange.record.metadata = metadata


def route_name(why: str) -> str:
    """What led a request to its model, without the explanation: the name of a route, `direct`, `alias`, `adapter`,
    `fallback`, ... A bounded set, so it may be a label."""
    return why.partition(";")[0]


def route_arm(why: str) -> str:
    """Of a request that named a route: `control` if it is in the control group, `off` if the route is switched off,
    otherwise `routed`. Of one whose model an experiment chose: its arm. Empty for all others."""
    if arm := why.partition("; arm=")[2]:
        return arm
    rule = why.partition("; rule=")[2].partition(";")[0]
    return "" if not rule else rule if rule in ("control", "off") else "routed"


def note_model(exchange: Exchange, asked: str, name: str, why: str, *, base_name: str = "", adapter: str = "") -> None:
    """Record that the model `name` answers a request for `asked`, and tell the client which one it is and why."""
    exchange.timeline.asked_model = asked[:256]
    exchange.timeline.selection = why[:256]
    exchange.record.model_version = base_name or name
    exchange.record.adapter_id = adapter or None
    exchange.extra_headers += [
        (b"x-penstock-model", name.encode("latin-1", "replace")),
        (b"x-penstock-route", why.encode()),
    ]
