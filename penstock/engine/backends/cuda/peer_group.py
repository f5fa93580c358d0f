"""Collectives over peer memory for one group of ranks; the kernels are in `kernels.peers`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.cuda import peer_memory
from penstock.engine.backends.cuda.fp8_quantizer import Fp8Activations
from penstock.engine.backends.cuda.kernels import peers
from penstock.engine.backends.cuda.kernels.addends import Addends
from penstock.engine.backends.cuda.linear import ScaledTensor
from penstock.engine.backends.cuda.ops import TritonOps

LARGEST = 4 << 20
"""Bytes up to which these kernels are used between GPUs: about 256 tokens. They use a part of the GPU and two slots of
memory; NCCL moves more at a time."""
_TWO_SHOT_FROM = {2: None, 3: 1 << 20, 4: 512 << 10}
"""Bytes from which the second wait of a two-shot sum costs less than reading every rank's contribution, by ranks."""
_TWO_SHOT_FROM_MANY = 128 << 10


def is_two_shot(nbytes: int, ranks: int) -> bool:
    """Which form a sum takes; the numbers are the same in either."""
    least = _TWO_SHOT_FROM.get(ranks, _TWO_SHOT_FROM_MANY)
    return least is not None and nbytes >= least


class CudaPeerGroup:
    """See `PeerGroup`."""

    def __init__(
        self, regions: list[int], rank: int, device: torch.device, timeout_s: float, ranks_per_device: int
    ) -> None:
        self._peers = peers.Peers(regions, rank, device, timeout_s, ranks_per_device)
        # NCCL wants a GPU for each rank: where some share one, these kernels carry everything.
        self._any_size = ranks_per_device > 1
        self.size = len(regions)

    @classmethod
    def meet(cls, store: Any, rank: int, size: int, device: torch.device, timeout_s: float) -> CudaPeerGroup | None:
        """None where some ranks cannot see the memory of others."""
        if size > peers.MOST_RANKS:
            return None
        regions = peer_memory.open_regions(store, rank, size, peers.REGION_BYTES, device)
        if regions is None:
            return None
        return cls(regions, rank, device, timeout_s, peer_memory.ranks_per_device(store, rank, size, device))

    def takes(self, x: Tensor | Addends) -> bool:
        base = x if isinstance(x, Tensor) else x.base
        return base.is_contiguous() and (self._any_size or base.nbytes <= LARGEST)

    def sum(self, x: Tensor | Addends) -> Tensor:
        base = x if isinstance(x, Tensor) else x.base
        return peers.all_reduce(self._peers, x, two_shot=is_two_shot(base.nbytes, self.size))

    def add_rms_norm(
        self,
        ops: object,
        x: Tensor | Addends,
        residual: Tensor,
        weight: Tensor | None,
        eps: float,
        x_weight: Tensor | None,
    ) -> Any:
        base = x if isinstance(x, Tensor) else x.base
        if weight is None or not peers.fits_norm(base) or not self.takes(x):
            return None
        two_shot = is_two_shot(base.nbytes, self.size)
        if isinstance(ops, TritonOps):
            return peers.all_reduce_add_norm(self._peers, x, residual, weight, eps, x_weight, two_shot=two_shot)
        if isinstance(ops, Fp8Activations):
            both = peers.all_reduce_add_norm_fp8(self._peers, x, residual, weight, eps, x_weight, two_shot=two_shot)
            return ScaledTensor(*both)
        return None

    def gather(self, x: Tensor, outputs: int) -> Tensor:
        return peers.all_gather(self._peers, x, outputs)

    def broadcast(self, x: Tensor) -> Tensor:
        return peers.broadcast(self._peers, x)
