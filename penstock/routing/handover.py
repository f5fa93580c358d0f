"""Which replica computes a long prompt for the one that goes on with it.

Replicas say their role themselves (`EngineInfo.role`). One for `decode` is given, with a request, the address of one
for `prefill`, and decides by what it has cached whether to use it; the blocks go between the two, past the gateway. A
replica for `prefill` runs whole requests only while there is no other. Among several, the one with the fewest prompt
tokens before it computes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.backends.native import NativeBackend
from penstock.engine.request import Handover, Request
from penstock.routing.flights import Leg
from penstock.routing.member import Member

BACKLOG = 8
"""A prompt before which so many times its own length waits is computed where it is used."""

log = logging.getLogger("penstock.routing")


@dataclass(frozen=True, slots=True)
class HandoverPolicy:
    """When prompts are handed over."""

    least_tokens: int = 512
    """Tokens to compute from which on another replica does it."""
    wait_s: float = 10.0
    """A replica that completes no step for so long is not waited for."""


class Handovers:
    """Arranges for prompts to be computed elsewhere."""

    def __init__(self, policy: HandoverPolicy) -> None:
        self._policy = policy
        self._refused: set[tuple[str, str]] = set()
        """Instances whose blocks were found not to fit, of which the log tells once."""

    def arrange(self, request: Request, leg: Leg, members: Sequence[Member], now: float) -> Request:
        """The request as the replica of `leg` shall have it: with the address of whoever computes its prompt, when that
        is another, which is the leg's helper from now on."""
        member, tokens = leg.member, len(request.prompt) + len(request.produced)
        if member.role != "decode" or tokens < self._policy.least_tokens:
            return request
        helpers = [other for other in members if other.role == "prefill" and other.takes(request)]
        helpers = [other for other in helpers if self._fits(other, member)]
        if not helpers:
            return request
        queued, helper = min(((other.view(now).queued_tokens, other) for other in helpers), key=lambda pair: pair[0])
        if queued > BACKLOG * tokens:
            return request
        backend = helper.backend
        assert isinstance(backend, NativeBackend)
        source = Handover(backend.endpoint, backend.public_key, self._policy.least_tokens, self._policy.wait_s)
        leg.helper = helper
        helper.meter.sent(leg.flight.id, tokens, 0, now)
        return replace(request, handover=source)

    def _fits(self, helper: Member, member: Member) -> bool:
        """Whether the one can use the other's blocks. The engines check it too; asking in vain would cost time."""
        theirs, ours = helper.backend.info, member.backend.info
        if theirs is None or ours is None or not isinstance(helper.backend, NativeBackend):
            return False
        if theirs.kv_format == ours.kv_format and ours.kv_format:
            return True
        pair = (theirs.instance, ours.instance)
        if pair not in self._refused and theirs.kv_format != ours.kv_format:
            self._refused.add(pair)
            log.error(
                "replicas cannot hand prompts over: their KV blocks differ",
                extra={
                    "prefill_replica": helper.name,
                    "decode_replica": member.name,
                    "prefill_has": theirs.kv_format or "none to give",
                    "decode_has": ours.kv_format or "no use for any",
                },
            )
        return False


def generating(members: Sequence[Member]) -> Sequence[Member]:
    """Those that run whole requests: all but the replicas for prefill, and these too while there is no other."""
    return [member for member in members if member.role != "prefill"] or members
