"""The admission decision: an arriving request runs, waits, or is refused with a time to retry.

A pure function of the request, the queue's state, the capacity, the rules and one random number. It weighs, in this
order: free capacity (slots and KV cache); the predicted wait (the request's place in the queue, given by class and
fairness, at the measured drain rate) against the longest wait the caller accepts; and, from `shed_from` (80% load) on,
the value of the request: what the tenant pays, how short and how well cached the request is, how much of its budget is
left, and how much service the tenant got recently.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.config.routing import AdmissionConfig
from penstock.protocol.errors import Reason
from penstock.routing.admission.queue import BATCH, Capacity, QueueEntry, QueueState, class_max_wait_s, max_waiting

TYPICAL_COST = 2000.0
"""Cost of a request that counts as neither short nor long."""
UNKNOWN_RETRY_S = 1.0
MARGIN = 0.75
"""Part of its longest wait that a request may be predicted to wait. Predictions can be wrong, and an immediate refusal
is better than a timeout."""


class DecisionInput(msgspec.Struct, frozen=True):
    """An arriving request, as far as the decision needs it."""

    entry: QueueEntry
    prompt_tokens: int = 1
    cached_tokens: int = 0
    """Prompt tokens that are probably cached."""
    budget_left: float = 1.0
    """Remaining part, 0 to 1, of the tightest of the caller's budgets and limits; 1 when it has none."""
    max_wait_s: float = 10.0
    """The longest it may wait."""


class Verdict(msgspec.Struct, frozen=True):
    """The decision about one request."""

    action: Literal["admit", "queue", "refuse"]
    wait_s: float = 0.0
    """Predicted wait; for a refused request, the time after which to retry."""
    reason: Reason | None = None


def decide(
    request: DecisionInput, state: QueueState, capacity: Capacity, rules: AdmissionConfig, roll: float
) -> Verdict:
    """Decides about `request`. `roll` is uniform in [0, 1)."""
    entry = request.entry
    if not state.depth and fits(entry, state.in_flight, state.kv_tokens, capacity):
        return Verdict("admit")
    wait = predicted_wait(entry, state, rules)
    starved = has_slots(entry, state.in_flight, capacity) and not has_memory(entry, state.kv_tokens, capacity)
    reason: Reason = "memory_pressure" if starved else "load_shed"
    pressure = wait / (request.max_wait_s * MARGIN)
    if pressure >= 1.0:
        return Verdict("refuse", wait, reason)
    pressure = max(pressure, crowding(entry, state, capacity, rules))
    if roll < shed_share(pressure, value_of(request, state), rules):
        return Verdict("refuse", max(wait, UNKNOWN_RETRY_S), reason)
    return Verdict("queue", wait)


def fits(entry: QueueEntry, in_flight: int, kv_tokens: int, capacity: Capacity) -> bool:
    """Whether `entry` fits beside what runs. An entry that would run alone always fits, unless slots are reserved."""
    if not in_flight:
        return not capacity.strict or has_slots(entry, 0, capacity)
    return has_slots(entry, in_flight, capacity) and has_memory(entry, kv_tokens, capacity)


def has_slots(entry: QueueEntry, in_flight: int, capacity: Capacity) -> bool:
    return capacity.slots is None or in_flight + entry.slots <= capacity.slots


def has_memory(entry: QueueEntry, kv_tokens: int, capacity: Capacity) -> bool:
    return capacity.kv_tokens is None or kv_tokens + entry.kv_tokens <= capacity.kv_tokens


def predicted_wait(entry: QueueEntry, state: QueueState, rules: AdmissionConfig) -> float:
    """Seconds until everything ahead of `entry` would be granted; 0 while the drain rate is not known."""
    work, rates = state.work, state.rates
    if rates is None:
        return 0.0
    if rules.order in ("fcfs", "sjf"):
        return sum(work) / rates[0]
    # Higher classes go first, including requests yet to come: this class drains at the rate they leave over.
    share = fair_share(entry, state) if rules.order == "fair" else 1.0
    above = sum(work[rank] / rates[rank] for rank in range(entry.rank))
    wait = share * work[entry.rank] / rates[entry.rank]
    if rules.order == "fair" and state.own_age_s is not None:
        # A tenant's entries are granted in order, and those ahead of this one will have timed out by then.
        wait = min(wait, max(class_max_wait_s(rules, entry.rank) - state.own_age_s, 0.0))
    return above + wait


def fair_share(entry: QueueEntry, state: QueueState) -> float:
    """The part of its class's waiting work that is ahead of `entry`, 0 to 1. Tenants take turns by weight, so a tenant
    with little waiting is not behind all of another's backlog."""
    total = state.work[entry.rank]
    if total <= 0:
        return 1.0
    return min(state.own_work * state.active_weight / entry.weight / total, 1.0)


def crowding(entry: QueueEntry, state: QueueState, capacity: Capacity, rules: AdmissionConfig) -> float:
    """How full the queue is for this request, 0 to 1; lower classes and, with `fair`, other tenants' backlogs do not
    count."""
    if rules.order in ("fcfs", "sjf"):
        before = float(state.depth)
    else:
        share = fair_share(entry, state) if rules.order == "fair" else 1.0
        before = sum(state.queued[: entry.rank]) + share * state.queued[entry.rank]
    return min(before / max(max_waiting(rules, capacity), 1), 1.0)


def value_of(request: DecisionInput, state: QueueState) -> float:
    """The value of serving this request rather than another, 0 to 1: paid before free, short before long, cached before
    uncached, unspent budgets before spent ones, under-served tenants before over-served ones."""
    entry = request.entry
    return (
        0.30 * (1.0 - 1.0 / max(entry.weight, 1.0))
        + 0.20 * (1.0 - entry.rank / BATCH)
        + 0.15 / (1.0 + entry.cost / TYPICAL_COST)
        + 0.10 * min(request.cached_tokens / max(request.prompt_tokens, 1), 1.0)
        + 0.10 * min(max(request.budget_left, 0.0), 1.0)
        + 0.15 / (1.0 + max(state.excess, 0.0) / TYPICAL_COST)
    )


def shed_share(pressure: float, value: float, rules: AdmissionConfig) -> float:
    """The probability of shedding such a request: 0 up to `shed_from`, then rising with load, most for low values."""
    if pressure < rules.shed_from or rules.shed_from >= 1.0:
        return 0.0
    ramp = min((pressure - rules.shed_from) / (1.0 - rules.shed_from), 1.0)
    return ramp * (1.0 - min(max(value, 0.0), 1.0))


def saturated(state: QueueState, capacity: Capacity, rules: AdmissionConfig) -> bool:
    """Whether so many requests wait per replica that best-effort callers should go to a smaller model."""
    return state.depth > rules.downgrade_depth * max(capacity.replicas, 1)
