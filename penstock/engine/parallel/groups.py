"""Collectives between ranks; the backend supplies the groups (gloo between CPUs, NCCL between CUDA devices) and, where
ranks can see each other's memory, collectives of its own.

A rank belongs to a group of the shards of its stage and one of the stages of its shard; one more, over the stages of
shard 0, is for the way back from the last stage to rank 0. Groups are objects, not
torch's global ones, so that several engines can live in one process. Every call has the same deadline: a missing peer
is an error, not a hang.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engine.backends.backend import Backend, PeerGroup
from penstock.engine.backends.host_memory import is_host
from penstock.engine.backends.interface import ActivationOps
from penstock.engine.parallel.layout import Place
from penstock.engine.parallel.rendezvous import Rendezvous

if TYPE_CHECKING:
    from penstock.engine.parallel.link_group import LinkGroup


class Transfer(Protocol):
    """A tensor on its way. What is sent must stay as it is, and what is received is there, once `wait` has returned."""

    def wait(self) -> object: ...


@dataclass(frozen=True, slots=True)
class _Copied:
    """A transfer of `host`, which is written into another tensor in the end."""

    transfer: Transfer
    host: Tensor
    into: Tensor | None = None

    def wait(self) -> None:
        self.transfer.wait()
        if self.into is not None and self.into is not self.host:
            self.into.copy_(self.host)


class Group:
    """Ranks that hold parts of the same thing. All members call the same methods in the same order."""

    resident = True
    """See `Groups`."""

    def __init__(
        self, group: Any, rank: int, size: int, in_order: bool = False, peers: PeerGroup | None = None
    ) -> None:
        """`in_order`: sums are made in the order of ranks. An all-reduce chooses the order of each element by its place
        in the tensor, and so by what else is in the step. `peers`: for what the members can exchange without a host."""
        self._group = group
        self.rank = rank
        self.size = size
        self.in_order = in_order
        self.peers = peers

    @property
    def needs_host(self) -> bool:
        """Whether a host takes part in some exchange, so that steps cannot be captured."""
        return self._group.name() == "gloo" and self.peers is None

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every member's `x`, in place."""
        if self.peers is not None and (self.in_order or self.peers.takes(x)):
            return self.peers.sum(x)
        if self.in_order:
            first, *others = self.gather(x)
            for other in others:
                first += other
            return x.copy_(first)
        self._group.allreduce([x]).wait()
        return x

    def add_rms_norm(
        self, ops: ActivationOps, x: Any, residual: Tensor, weight: Tensor | None, eps: float, x_weight: Tensor | None
    ) -> Any:
        """`ops.add_rms_norm` of the sum of every member's `x`."""
        if self.peers is not None and not self.in_order:  # steps of any size then take the same operations
            done = self.peers.add_rms_norm(ops, x, residual, weight, eps, x_weight)
            if done is not None:
                return done
        return ops.add_rms_norm(self.sum(x), residual, weight, eps, x_weight)

    def join(self, x: Tensor, outputs: int) -> Tensor:
        """Every member's `x` [T, n] side by side, the first `outputs` columns of that."""
        if self.peers is not None and self.peers.takes(x):
            return self.peers.gather(x, outputs)
        size = x.shape[-1]
        parts = (part[..., : max(0, outputs - i * size)] for i, part in enumerate(self.gather(x)))
        return torch.cat(list(parts), dim=-1)

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every member's `x`, in order; all of one shape."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return parts

    def broadcast(self, x: Tensor) -> Tensor:
        """The first member's `x`, written over those of all others."""
        if self.peers is not None and self.peers.takes(x):
            return self.peers.broadcast(x)
        self._group.broadcast(x, 0).wait()
        return x

    def exchange(self, x: Tensor, counts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Rows of `x` to the members: the first `counts[0]` to the first, and so on. The rows that came from them,
        `sizes` of each, in order."""
        mine = x.cpu() if self._through_host(x) else x.contiguous()
        out = mine.new_empty(sum(sizes), *x.shape[1:])
        self._group.alltoall_base(out, mine, list(sizes), list(counts)).wait()
        return out.to(x.device)

    def exchange_counts(self, counts: Tensor) -> list[int]:
        """`counts` int64 [size] of rows for each member; how many each of them has for this one."""
        return self.exchange(counts, [1] * self.size, [1] * self.size).tolist()

    def leave(self) -> None:
        self._group = None

    def join_again(self, group: Any) -> None:
        self._group = group

    def begin_send(self, x: Tensor, to: int) -> Transfer:
        """Does not wait for the receiver."""
        host = x.cpu() if self._through_host(x) else x
        return _Copied(self._group.send([host], to, 0), host)

    def begin_receive(self, x: Tensor, source: int) -> Transfer:
        """What `source` sends, written into `x`. Several may be under way; they come in the order of the calls."""
        host = torch.empty_like(x, device="cpu") if self._through_host(x) else x
        return _Copied(self._group.recv([host], source, 0), host, x)

    def _through_host(self, x: Tensor) -> bool:
        """Gloo, for ranks that share a device, sends from host memory only."""
        return bool(self._group.name() == "gloo") and not is_host(x.device)


class Groups:
    """The groups of one rank; None where it would be alone."""

    resident = True
    """Its memory may be known to other processes: it stays on the device while the engine sleeps."""

    def __init__(self, place: Place, rendezvous: Rendezvous, backend: Backend) -> None:
        self.place = place
        self._backend = backend
        self._rendezvous = rendezvous
        here = len(rendezvous.beside(place.rank))
        self._store = dist.FileStore(str(rendezvous.meeting_place(rendezvous.generation)), here)  # type: ignore[attr-defined]
        self._deadline = timedelta(seconds=rendezvous.timeout_s)
        self._made: list[tuple[str, Group]] = []
        """Those between processes of this machine, with what they are known by."""
        self._linked: list[LinkGroup] = []
        """Those between machines."""
        shards = range(place.stage * place.tensor, (place.stage + 1) * place.tensor)
        stages = range(place.shard, place.world, place.tensor)
        self.tensor = self._group(f"tensor/{place.stage}", shards)
        self.pipeline = self._group(f"pipeline/{place.shard}", stages)
        # The way back is a group of its own: what NCCL does in one group waits for what was begun there before.
        self.back = self._group("back", stages) if place.shard == 0 else None

    @property
    def capturable(self) -> bool:
        """Whether steps can be captured with the exchanges in them. A pipeline's stages take turns instead."""
        return self.place.pipeline == 1 and self.tensor is not None and not self.tensor.needs_host

    def of_first(self, shards: int) -> Groups:
        """For a model that only the first `shards` of the first stage hold, which all call this."""
        first = copy.copy(self)
        first.place = Place(self.place.rank, shards, 1)
        if shards != self.place.tensor:
            first.tensor = self._group("tensor/first", range(shards))
        first.pipeline = first.back = None
        return first

    def _group(self, name: str, members: Sequence[int]) -> Group | None:
        """Of the ranks `members`, of which this is one; they all call it the same."""
        if len(members) == 1:
            return None
        if self._rendezvous.spans(members):
            from penstock.engine.parallel.link_group import LinkGroup

            assert self._rendezvous.link is not None, "ranks on several machines have a link"
            self._linked.append(LinkGroup(self._rendezvous.link, members, name, self._rendezvous.timeout_s))
            return self._linked[-1]
        backend = self._backend
        rank, size = members.index(self.place.rank), len(members)

        def apart(kind: str) -> Any:
            return dist.PrefixStore(f"{kind}/{name}", self._store)  # type: ignore[attr-defined]

        group = Group(
            backend.process_group(apart("torch"), rank, size, self._deadline),
            rank,
            size,
            backend.ops.batch_invariant,
            backend.peer_group(apart("peers"), rank, size, self._deadline) if name.startswith("tensor/") else None,
        )
        self._made.append((name, group))
        return group

    def drop(self) -> None:
        """Leave all groups: whoever waits for this rank in one of them is told at once, if no transfer that was begun
        still holds it. Those on other machines are told otherwise (`Link`)."""
        for _, group in self._made:
            group.leave()
        gc.collect()  # of what failed, frames that hold such transfers

    def renew(self, generation: int) -> None:
        """Meet again, as the same members, at another place. All ranks call it together; only where they have no
        memory in common (`peers`)."""
        self.drop()
        link, old = self._rendezvous.link, [group.number for group in self._linked]
        for linked in self._linked:
            linked.renew(generation)
        if link is not None:
            link.renew(generation, old)
        here = len(self._rendezvous.beside(self.place.rank))
        store = self._rendezvous.meeting_place(generation)
        self._store = dist.FileStore(str(store), here)  # type: ignore[attr-defined]
        for name, group in self._made:
            apart = dist.PrefixStore(f"torch/{name}", self._store)  # type: ignore[attr-defined]
            group.join_again(self._backend.process_group(apart, group.rank, group.size, self._deadline))
