"""Prefill/decode disaggregation: chooses the replica that computes a long prompt for a decode replica.

Replicas report their role (`EngineInfo.role`). A decode replica gets the address of a prefill replica with the request
and decides by its own prefix cache whether to use it; the KV blocks travel directly between the two. A prefill replica
runs whole requests only while there is no other replica. Among several prefill replicas, the one with the fewest queued
prompt tokens is used.
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
"""If a prefill replica has more than this many times the prompt's length queued, the decode replica computes it."""

log = logging.getLogger("penstock.routing")


@dataclass(frozen=True, slots=True)
class HandoverPolicy:
    """When prompts are computed on a prefill replica."""

    least_tokens: int = 512
    """Minimum of tokens to compute for which a prefill replica is used."""
    wait_s: float = 10.0
    """How long a decode replica waits for a prefill replica that completes no step."""


class Handovers:
    """Assigns prefill replicas to requests."""

    def __init__(self, policy: HandoverPolicy) -> None:
        self.policy = policy
        self._refused: set[tuple[str, str]] = set()
        """Pairs of instances with incompatible blocks, which are logged once."""

    def arrange(self, request: Request, leg: Leg, members: Sequence[Member], now: float) -> Request:
        """The request to send to the replica of `leg`, with the address of a prefill replica if one is used; that
        replica becomes the leg's helper."""
        member, tokens = leg.member, len(request.prompt) + len(request.produced)
        if member.role != "decode" or tokens < self.policy.least_tokens:
            return request
        helpers = [other for other in members if other.role == "prefill" and other.takes(request)]
        # Within a pool, so that one pool's prompts do not delay another's; blocks never travel between regions.
        here = (member.place.pool, member.place.region)
        helpers = [other for other in helpers if (other.place.pool, other.place.region) == here]
        helpers = [other for other in helpers if self._fits(other, member)]
        if not helpers:
            return request
        queued, helper = min(((other.view(now).queued_tokens, other) for other in helpers), key=lambda pair: pair[0])
        if queued > BACKLOG * tokens:
            return request
        backend = helper.backend
        assert isinstance(backend, NativeBackend)
        source = Handover(backend.endpoint, backend.public_key, self.policy.least_tokens, self.policy.wait_s)
        leg.helper = helper
        helper.meter.sent(leg.flight.id, tokens, 0, now)
        return replace(request, handover=source)

    def _fits(self, helper: Member, member: Member) -> bool:
        """Whether `member` can use the KV blocks of `helper`. The engines check it too, but a failed attempt costs
        time."""
        theirs, ours = helper.backend.info, member.backend.info
        if theirs is None or ours is None or not isinstance(helper.backend, NativeBackend):
            return False
        if theirs.kv_format == ours.kv_format and ours.kv_format:
            return True
        pair = (theirs.instance, ours.instance)
        if pair not in self._refused and theirs.kv_format != ours.kv_format:
            self._refused.add(pair)
            log.error(
                "prefill and decode replica have different KV block formats; prompts are computed where they are used",
                extra={
                    "prefill_replica": helper.name,
                    "decode_replica": member.name,
                    "prefill_has": theirs.kv_format or "none",
                    "decode_has": ours.kv_format or "none",
                },
            )
        return False


def generating(members: Sequence[Member]) -> Sequence[Member]:
    """The replicas that run whole requests: all but prefill replicas, or these when there are no others."""
    return [member for member in members if member.role != "prefill"] or members
