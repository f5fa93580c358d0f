"""Collectives between ranks; the backend supplies the groups (gloo between CPUs, NCCL between CUDA devices).

A rank belongs to a group of the shards of its stage and one of the stages of its shard; one more, over the stages of
shard 0, is for the way back from the last stage to rank 0. Groups are objects, not
torch's global ones, so that several engines can live in one process. Every call has the same deadline: a missing peer
is an error, not a hang.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engine.backends.backend import Backend
from penstock.engine.parallel.layout import Place


class Transfer(Protocol):
    """A tensor on its way. What is sent must stay as it is, and what is received is there, once `wait` has returned."""

    def wait(self) -> object: ...


class Group:
    """Ranks that hold parts of the same thing. All members call the same methods in the same order."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group = group
        self.rank = rank
        self.size = size

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every member's `x`, in place."""
        self._group.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every member's `x`, in order; all of one shape."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return parts

    def broadcast(self, x: Tensor) -> Tensor:
        """The first member's `x`, written over those of all others."""
        self._group.broadcast(x, 0).wait()
        return x

    def begin_send(self, x: Tensor, to: int) -> Transfer:
        """Does not wait for the receiver."""
        transfer: Transfer = self._group.send([x], to, 0)
        return transfer

    def begin_receive(self, x: Tensor, source: int) -> Transfer:
        """What `source` sends, written into `x`. Several may be under way; they come in the order of the calls."""
        transfer: Transfer = self._group.recv([x], source, 0)
        return transfer


class Groups:
    """The groups of one rank; None where it would be alone."""

    def __init__(self, place: Place, store: Path, backend: Backend, timeout_s: float) -> None:
        self.place = place
        meeting = dist.FileStore(str(store), place.world)  # type: ignore[attr-defined]
        deadline = timedelta(seconds=timeout_s)

        def group(name: str, rank: int, size: int) -> Group | None:
            if size == 1:
                return None
            apart = dist.PrefixStore(name, meeting)  # type: ignore[attr-defined]
            return Group(backend.process_group(apart, rank, size, deadline), rank, size)

        self.tensor = group(f"tensor/{place.stage}", place.shard, place.tensor)
        self.pipeline = group(f"pipeline/{place.shard}", place.stage, place.pipeline)
        # The way back is a group of its own: what NCCL does in one group waits for what was begun there before.
        self.back = group("back", place.stage, place.pipeline) if place.shard == 0 else None
