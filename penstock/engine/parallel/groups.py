"""Collectives between ranks: gloo between CPUs, NCCL between CUDA devices.

A rank belongs to at most two groups: the shards of its stage, and the stages of its shard. Groups are objects, not
torch's global ones, so that several engines can live in one process. Every call has the same deadline: a peer that
does not come is an error, not a hang.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engine.parallel.layout import Place
from penstock.errors import ConfigError


class Group:
    """Ranks that hold parts of the same thing. All members call the same methods in the same order."""

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        self._backend = backend
        self.rank = rank
        self.size = size

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every member's `x`, in place."""
        self._backend.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every member's `x`, in order; all of one shape."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._backend.allgather([parts], [x.contiguous()]).wait()
        return parts

    def broadcast(self, x: Tensor) -> Tensor:
        """The first member's `x`, written over everybody else's."""
        self._backend.broadcast(x, 0).wait()
        return x

    def send(self, x: Tensor, to: int) -> None:
        self._backend.send([x], to, 0).wait()

    def receive(self, x: Tensor, source: int) -> Tensor:
        """What `source` sent, written into `x`."""
        self._backend.recv([x], source, 0).wait()
        return x


class Groups:
    """The groups of one rank; None where it would be alone."""

    def __init__(self, place: Place, store: Path, device: torch.device, timeout_s: float) -> None:
        self.place = place
        meeting = dist.FileStore(str(store), place.world)  # type: ignore[attr-defined]
        deadline = timedelta(seconds=timeout_s)

        def group(name: str, rank: int, size: int) -> Group | None:
            if size == 1:
                return None
            apart = dist.PrefixStore(name, meeting)  # type: ignore[attr-defined]
            return Group(_backend(apart, rank, size, device, deadline), rank, size)

        self.tensor = group(f"tensor/{place.stage}", place.shard, place.tensor)
        self.pipeline = group(f"pipeline/{place.shard}", place.stage, place.pipeline)


def _backend(store: Any, rank: int, size: int, device: torch.device, deadline: timedelta) -> Any:
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = deadline
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    if not dist.is_gloo_available():
        raise ConfigError("this torch was built without gloo, which ranks on CPU need")
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # Ranks of one engine share a machine; the name of the host may lead to a network that blocks them.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = deadline
    return dist.ProcessGroupGloo(store, rank, size, options)
