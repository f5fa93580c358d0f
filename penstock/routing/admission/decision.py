"""The one decision about a request that arrives: run, wait, or be refused, and when to come back.

A pure function of what is asked, how the queue stands, how much room there is, the rules, and one random number. It
weighs, in this order: room (slots and KV cache), the place in line that class and fairness give, the time that place
will take at the measured drain rate against the time the caller has, and, from 80% load on, a value made of what the
tenant pays, how short and how cached the request is, how much of its budget is left and how much it was served lately.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.config.routing import AdmissionConfig
from penstock.protocol.errors import Reason
from penstock.routing.admission.queue import BATCH, Entry, Room, Standing, most_waiting, patience_of

TYPICAL_COST = 2000.0
"""Cost at which a request counts as neither short nor long."""
UNKNOWN_RETRY_S = 1.0
MARGIN = 0.75
"""The part of its patience that a request may be predicted to wait: predictions are off at times, and it is better to
be refused at once than after having waited."""


class Ask(msgspec.Struct, frozen=True):
    """A request that wants to run, as far as the decision is concerned."""

    entry: Entry
    prompt_tokens: int = 1
    cached_tokens: int = 0
    """How much of the prompt is probably cached."""
    budget_left: float = 1.0
    """Part of the tightest of its caller's budgets and limits that is left, 0 to 1; 1 when nothing limits it."""
    patience_s: float = 10.0
    """How long it may wait."""


class Verdict(msgspec.Struct, frozen=True):
    """What becomes of an ask."""

    action: Literal["admit", "queue", "refuse"]
    wait_s: float = 0.0
    """How long it will probably wait; for a refused one: after which it should come back."""
    reason: Reason | None = None


def decide(ask: Ask, standing: Standing, room: Room, rules: AdmissionConfig, roll: float) -> Verdict:
    """What to do with `ask`. `roll` is uniform in [0, 1)."""
    entry = ask.entry
    if not standing.depth and fits(entry, standing.in_flight, standing.kv_tokens, room):
        return Verdict("admit")
    wait = predicted_wait(entry, standing, rules)
    starved = has_slots(entry, standing.in_flight, room) and not has_memory(entry, standing.kv_tokens, room)
    reason: Reason = "memory_pressure" if starved else "load_shed"
    pressure = wait / (ask.patience_s * MARGIN)
    if pressure >= 1.0:
        return Verdict("refuse", wait, reason)
    pressure = max(pressure, crowding(entry, standing, room, rules))
    if roll < shed_share(pressure, value_of(ask, standing), rules):
        return Verdict("refuse", max(wait, UNKNOWN_RETRY_S), reason)
    return Verdict("queue", wait)


def fits(entry: Entry, in_flight: int, kv_tokens: int, room: Room) -> bool:
    """Whether `entry` can run beside what runs. Whoever is alone always can."""
    return not in_flight or (has_slots(entry, in_flight, room) and has_memory(entry, kv_tokens, room))


def has_slots(entry: Entry, in_flight: int, room: Room) -> bool:
    return room.slots is None or in_flight + entry.slots <= room.slots


def has_memory(entry: Entry, kv_tokens: int, room: Room) -> bool:
    return room.kv_tokens is None or kv_tokens + entry.kv_tokens <= room.kv_tokens


def predicted_wait(entry: Entry, standing: Standing, rules: AdmissionConfig) -> float:
    """Seconds until what is before `entry` has been granted, were it to wait; 0 while the drain rate is not known."""
    work, rates = standing.work, standing.rates
    if rates is None:
        return 0.0
    if rules.order in ("fcfs", "sjf"):
        return sum(work) / rates[0]
    # Higher classes go first, and those that are still to come do too: only what they leave drains this one.
    share = fair_share(entry, standing) if rules.order == "fair" else 1.0
    above = sum(work[rank] / rates[rank] for rank in range(entry.rank))
    wait = share * work[entry.rank] / rates[entry.rank]
    if rules.order == "fair" and standing.own_age_s is not None:
        # A tenant's entries go one after the other, and whoever is before this one has given up by then.
        wait = min(wait, max(patience_of(rules, entry.rank) - standing.own_age_s, 0.0))
    return above + wait


def fair_share(entry: Entry, standing: Standing) -> float:
    """The part of what waits in its class that is before `entry`, 0 to 1: tenants take turns by weight, so one with
    little waiting is not behind all of another's flood."""
    total = standing.work[entry.rank]
    if total <= 0:
        return 1.0
    weights = standing.active_weight + (0.0 if standing.own_work else entry.weight)
    return min(standing.own_work * weights / entry.weight / total, 1.0)


def crowding(entry: Entry, standing: Standing, room: Room, rules: AdmissionConfig) -> float:
    """How full the queue is for this request, 0 to 1: lower classes and, if `fair`, floods of others do not count."""
    if rules.order in ("fcfs", "sjf"):
        before = float(standing.depth)
    else:
        share = fair_share(entry, standing) if rules.order == "fair" else 1.0
        before = sum(standing.queued[: entry.rank]) + share * standing.queued[entry.rank]
    return min(before / max(most_waiting(rules, room), 1), 1.0)


def value_of(ask: Ask, standing: Standing) -> float:
    """What speaks for serving this request rather than another, 0 to 1: paid before free, short before long, cached
    before fresh, unspent budgets before spent ones, the under-served before the over-served."""
    entry = ask.entry
    return (
        0.30 * (1.0 - 1.0 / max(entry.weight, 1.0))
        + 0.20 * (1.0 - entry.rank / BATCH)
        + 0.15 / (1.0 + entry.cost / TYPICAL_COST)
        + 0.10 * min(ask.cached_tokens / max(ask.prompt_tokens, 1), 1.0)
        + 0.10 * min(max(ask.budget_left, 0.0), 1.0)
        + 0.15 / (1.0 + max(standing.excess, 0.0) / TYPICAL_COST)
    )


def shed_share(pressure: float, value: float, rules: AdmissionConfig) -> float:
    """The part of requests like this that is refused: none up to `shed_from`, then more, the least valued most."""
    if pressure < rules.shed_from or rules.shed_from >= 1.0:
        return 0.0
    ramp = min((pressure - rules.shed_from) / (1.0 - rules.shed_from), 1.0)
    return ramp * (1.0 - min(max(value, 0.0), 1.0))


def saturated(standing: Standing, room: Room, rules: AdmissionConfig) -> bool:
    """Whether so many wait per replica that best-effort callers are better served by a smaller model."""
    return standing.depth > rules.downgrade_depth * max(room.replicas, 1)
