"""The order in which the replicas of a model are tried for a request: pool by pool as the request allows, within a pool
the best region first, within a region as the replica policy says.

Invariant: the policy sees every placement, those of other gateways too, because it records which prefixes each replica
has; a replica that has left is forgotten. A plain object; the caller passes the time and sends the request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.engine.kv.block_hash import DIGEST_SIZE
from penstock.engine.request import Request
from penstock.protocol.messages import Placement
from penstock.routing.handover import generating
from penstock.routing.member import Member
from penstock.routing.policies import Predicted
from penstock.routing.policy import ReplicaPolicy, ReplicaRequest
from penstock.routing.regions import RegionChoice


class ReplicaOrder:
    """See the top of the file."""

    def __init__(self, policy: ReplicaPolicy, regions: RegionChoice) -> None:
        self.policy = policy
        self.regions = regions
        self._estimate = policy if isinstance(policy, Predicted) else Predicted()
        """Predicts how long replicas take, to compare regions."""

    def wanted(self, request: Request, member: Member, expected: int) -> ReplicaRequest:
        """The request as the policy sees it; `member` is any of its replicas, `expected` the tokens it may generate."""
        info = member.backend.info
        return ReplicaRequest.of(
            request,
            info.block_size if info is not None else 16,
            expected_output=expected,
            wants_blocks=self.policy.wants_blocks,
            session=request.affinity,
            tenant=request.cache_salt,
        )

    def of(
        self, request: Request, able: Sequence[Member], wanted: ReplicaRequest | None, now: float
    ) -> Iterator[Member]:
        """The replicas to try: those of the first pool that the request may use, the best one first, then the next
        pool's. `wanted`: None for a single replica."""
        for pool in request.pools or ("",):
            left = [member for member in able if not request.pools or member.place.pool == pool]
            left = left if wanted is None else list(generating(left))
            while left:
                yield left.pop(0 if wanted is None else self._choose(wanted, left, now))

    def forget(self, replica: str) -> None:
        """A replica has left, or has lost its cache."""
        self.policy.forget(replica)

    def heard(self, member: Member, placement: Placement, now: float) -> None:
        """Another gateway sent something to this replica."""
        names = placement.names
        blocks = [names[at : at + DIGEST_SIZE] for at in range(0, len(names), DIGEST_SIZE)]
        sent = ReplicaRequest(0, blocks=blocks, session=placement.session, tenant=placement.tenant)
        self.policy.heard(sent, member.view(now))

    def _choose(self, wanted: ReplicaRequest, able: Sequence[Member], now: float) -> int:
        """The index of the replica to use. Called even for a single candidate, because the policy records which
        prefixes each replica has."""
        views = [member.view(now) for member in able]
        first = able[0].place.region
        if all(member.place.region == first for member in able):
            return self.policy.choose(wanted, views)
        near = self.regions.choose(
            [member.place.region for member in able],
            [
                seconds - view.round_trip_s
                for seconds, view in zip(self._estimate.costs(wanted, views), views, strict=True)
            ],
            [member.round_trip_s for member in able],
            now,
        )
        return near[self.policy.choose(wanted, [views[index] for index in near])]
