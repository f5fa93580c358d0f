"""The replica policies and their registry. docs/routing.md explains formulas, defaults and trade-offs.

To add a policy, write a class here and put `@replica_policy("name")` above it: the configuration (`routing.policy`),
its error messages and `penstock config` read the names from `POLICIES`.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

from penstock.routing.policy import ReplicaPolicy, ReplicaRequest, ReplicaView
from penstock.routing.prefix_index import PrefixIndex

SESSIONS = 65_536
"""Sessions whose replica is remembered; the least recently used are forgotten first."""

POLICIES: dict[str, Callable[[], ReplicaPolicy]] = {}
"""The policies by the name that `routing.policy` uses."""
_Policy = TypeVar("_Policy", bound=Callable[[], ReplicaPolicy])


def replica_policy(name: str) -> Callable[[_Policy], _Policy]:
    """Registers a policy class under `name`."""

    def register(policy: _Policy) -> _Policy:
        POLICIES[name] = policy
        return policy

    return register


@dataclass(frozen=True, slots=True)
class PredictedWeights:
    """What the predicted policy trades against seconds of waiting."""

    prefill_tokens_per_s: float = 2000.0
    """Assumed speed while no replica has been measured."""
    decode_tokens_per_s: float = 500.0
    kv_knee: float = 0.8
    """KV cache use from which memory pressure counts."""
    kv_full_s: float = 2.0
    """Cost of a full cache: sequences are preempted and recomputed."""
    busy_s: float = 0.1
    """Cost of a replica whose slots are all taken, compared with an empty one: its tokens come more slowly."""
    session_s: float = 0.05
    """Value of staying on the session's replica, beyond its known cached prefix."""


@replica_policy("round_robin")
class RoundRobin:
    """Each replica in turn."""

    wants_blocks = False

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: ReplicaRequest, candidates: Sequence[ReplicaView]) -> int:
        allowed = usable(candidates)
        self._next += 1
        return allowed[self._next % len(allowed)]

    def heard(self, request: ReplicaRequest, replica: ReplicaView) -> None:
        """This policy keeps no state per replica."""

    def forget(self, replica: str) -> None:
        """This policy keeps no state per replica."""


@replica_policy("random")
class Random:
    """A random replica, in proportion to the weights."""

    wants_blocks = False

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def choose(self, request: ReplicaRequest, candidates: Sequence[ReplicaView]) -> int:
        return draw(self._rng, candidates, usable(candidates))

    def heard(self, request: ReplicaRequest, replica: ReplicaView) -> None:
        """This policy keeps no state per replica."""

    def forget(self, replica: str) -> None:
        """This policy keeps no state per replica."""


@replica_policy("power_of_two")
class PowerOfTwo:
    """The less busy of two random replicas: nearly as even as comparing all, and stale views cause no herding."""

    wants_blocks = False

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def choose(self, request: ReplicaRequest, candidates: Sequence[ReplicaView]) -> int:
        allowed = usable(candidates)
        first = draw(self._rng, candidates, allowed)
        if len(allowed) == 1:
            return first
        second = draw(self._rng, candidates, [index for index in allowed if index != first])
        return min((first, second), key=lambda index: candidates[index].running + candidates[index].waiting)

    def heard(self, request: ReplicaRequest, replica: ReplicaView) -> None:
        """This policy keeps no state per replica."""

    def forget(self, replica: str) -> None:
        """This policy keeps no state per replica."""


@replica_policy("predicted")
class Predicted:
    """The replica with the earliest predicted first token, corrected for memory pressure and session affinity."""

    wants_blocks = True

    def __init__(self, weights: PredictedWeights | None = None) -> None:
        self._weights = weights or PredictedWeights()
        self._prefixes = PrefixIndex()
        self._sessions: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._turn = 0

    def choose(self, request: ReplicaRequest, candidates: Sequence[ReplicaView]) -> int:
        allowed = usable(candidates)
        chosen = allowed[0]
        if len(allowed) > 1:
            # Rotate, so that replicas with equal scores take turns.
            self._turn += 1
            turn = self._turn % len(allowed)
            chosen, _ = self._best(request, candidates, allowed[turn:] + allowed[:turn])
        view = candidates[chosen]
        self._prefixes.sent(view.name, request.blocks, view.total_blocks)
        self._remember(request, view.name)
        return chosen

    def heard(self, request: ReplicaRequest, replica: ReplicaView) -> None:
        self._prefixes.sent(replica.name, request.blocks, replica.total_blocks)
        self._remember(request, replica.name)

    def forget(self, replica: str) -> None:
        self._prefixes.forget(replica)

    def seconds(self, request: ReplicaRequest, view: ReplicaView) -> float:
        """The predicted cost of sending `request` to this replica, in seconds."""
        return self._best(request, (view,), (0,))[1]

    def costs(self, request: ReplicaRequest, candidates: Sequence[ReplicaView]) -> list[float]:
        """The predicted cost of sending `request` to each of them, in seconds."""
        return [self._best(request, candidates, (index,))[1] for index in range(len(candidates))]

    def _typical(self, candidates: Sequence[ReplicaView]) -> tuple[float, float]:
        """Prefill and decode speed of a replica that has not been measured: the mean of the others."""
        prefills = [view.prefill_tokens_per_s for view in candidates if view.prefill_tokens_per_s is not None]
        decodes = [view.decode_tokens_per_s for view in candidates if view.decode_tokens_per_s is not None]
        return (
            sum(prefills) / len(prefills) if prefills else self._weights.prefill_tokens_per_s,
            sum(decodes) / len(decodes) if decodes else self._weights.decode_tokens_per_s,
        )

    def _best(
        self, request: ReplicaRequest, candidates: Sequence[ReplicaView], order: Sequence[int]
    ) -> tuple[int, float]:
        """The first candidate in `order` with the least cost, and that cost. One loop over all replicas for every
        request, so it makes as few calls as possible."""
        weights = self._weights
        prompt, blocks, size = max(request.prompt_tokens, 1), request.blocks, request.block_size
        held = self._prefixes.holders(blocks[0]) if blocks else ()
        home = self._home(request, candidates, order)
        typical: tuple[float, float] | None = None
        best, least = order[0], math.inf
        for index in order:
            view = candidates[index]
            prefill, decode = view.prefill_tokens_per_s, view.decode_tokens_per_s
            if not prefill or not decode:
                typical = typical or self._typical(candidates if len(candidates) > 1 else ())
                prefill, decode = prefill or typical[0], decode or typical[1]
            fresh = prompt
            if view.name in held:
                fresh = max(prompt - self._prefixes.matched(view.name, blocks) * size, 1)
            seconds = (view.queued_tokens + fresh) / prefill + view.round_trip_s
            slots = view.slots
            if slots:
                present = view.running + view.waiting
                if present < slots:
                    seconds += weights.busy_s * present / slots
                else:  # it waits for a running request to finish
                    seconds += (present + 1 - slots) * view.decoding_tokens / present / decode + weights.busy_s
            total = view.total_blocks
            if total:
                over = view.kv_use + (fresh + request.expected_output) / size / total - weights.kv_knee
                if over > 0:
                    seconds += weights.kv_full_s * (over / (1.0 - weights.kv_knee)) ** 2
            if home == view.name:
                seconds -= weights.session_s
            # A replica whose breaker is half open counts as slower, in proportion to its weight.
            if view.weight != 1.0 and view.weight > 0 and seconds > 0:
                seconds /= view.weight
            if seconds < least:
                best, least = index, seconds
        return best, least

    def _home(self, request: ReplicaRequest, candidates: Sequence[ReplicaView], order: Sequence[int]) -> str:
        """The replica of the request's session. Of a session that is new, or whose replica is gone, one that every
        gateway chooses alike, without asking the others (rendezvous hashing)."""
        if not request.session:
            return ""
        home = self._sessions.get((request.tenant, request.session), "")
        if len(order) == 1:
            return home
        names = [candidates[index].name for index in order]
        return home if home in names else max(names, key=lambda name: _rank(request, name))

    def _remember(self, request: ReplicaRequest, replica: str) -> None:
        if request.session:
            key = (request.tenant, request.session)
            self._sessions[key] = replica
            self._sessions.move_to_end(key)
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)


def _rank(request: ReplicaRequest, replica: str) -> bytes:
    return blake2b(f"{request.tenant}\0{request.session}\0{replica}".encode(), digest_size=8).digest()


def usable(candidates: Sequence[ReplicaView]) -> list[int]:
    """Indices of the candidates with a weight above 0, or of all candidates when there are none."""
    allowed = [index for index, view in enumerate(candidates) if view.weight > 0]
    return allowed or list(range(len(candidates)))


def draw(rng: random.Random, candidates: Sequence[ReplicaView], allowed: Sequence[int]) -> int:
    """A random index of `allowed`, in proportion to the candidates' weights."""
    weights = [candidates[index].weight for index in allowed]
    return rng.choices(allowed, weights if any(weights) else None)[0]


def make_policy(name: str, rng: random.Random | None = None) -> ReplicaPolicy:
    """A new instance of the policy named in the configuration (`routing.policy`); every model needs its own. `rng`: for
    policies that draw, where a run must be repeatable."""
    policy = POLICIES[name]()
    if rng is not None and isinstance(policy, Random | PowerOfTwo):
        return type(policy)(rng)
    return policy
