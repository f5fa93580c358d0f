"""Whether the products between two attentions of one token are one launch (`kernels.product_chain`) or several.

One launch, a chain, is faster for large layers in FP8; `docs/results/h200-kernels.md` has the measurement. Its blocks
wait for each other, so it is made only where all of them are certain to run at once. Elsewhere the products are
launched one by one, and the log says why.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from penstock.engine.backends.cuda import exclusive, nvrtc
from penstock.engine.backends.cuda.kernels.chain_plan import ChainShape, plan_chain
from penstock.engine.backends.interface import Link, LinkedProducts
from penstock.errors import ConfigError

log = logging.getLogger(__name__)

ONE_TOKEN = "PENSTOCK_ONE_TOKEN"
"""The environment variable that overrides the rule: `auto`, `chain` (whatever the size of a layer) or `launches`."""
LEAST_BYTES = 160_000_000
"""Of the weights of a chain. Layers with 16 MB of them lost 9% and those with 218 MB gained 9%; by a line through both
they break even near 70 MB. What lies between was not measured, so this leaves out models smaller than 7B; the last
chain of a step, which has no next layer, is a tenth smaller than the others."""

Make = Callable[[Sequence[Link], ChainShape, Tensor], LinkedProducts]
"""`ProductChain`: of links, a launch shape and the counter where blocks wait."""


def choice() -> str:
    """What the environment asks for."""
    value = os.environ.get(ONE_TOKEN, "") or "auto"
    if value not in ("auto", "chain", "launches"):
        raise ConfigError(f"{ONE_TOKEN}: {value!r} must be auto, chain or launches")
    return value


class Chains:
    """Those of one engine, on one device. They share a counter, so they have to run one after another."""

    def __init__(self, device: torch.device, make: Make) -> None:
        self.device = device
        self._make = make
        self._choice = choice()
        if self._choice == "chain" and device.type == "cuda" and not has_kernel(device):
            log.warning("%s=chain has no effect: its kernel is for compute capability 9.0", ONE_TOKEN)
        self._counter: Tensor | None = None
        self._problem: str | None = None
        """Why there are none."""
        self._told = False

    def of(self, links: Sequence[Link]) -> LinkedProducts | None:
        """A chain that is ready to be launched; None where there is no kernel for it, or launches are faster."""
        if self._problem is not None or not self._wants(links):
            return None
        try:
            if self._counter is None:
                _check(self.device, self)
                self._counter = new_counter(self.device)
            return self._make(links, shape_on(self.device), self._counter)
        except (nvrtc.CudaBuildError, nvrtc.CudaDriverError) as error:
            self._problem = str(error)
            log.warning("steps of one token launch their products one by one, which is slower: %s", self._problem)
            return None

    def _wants(self, links: Sequence[Link]) -> bool:
        if self._choice == "launches" or not has_kernel(self.device):
            return False
        if self._choice == "auto" and sum(link.weight.nbytes for link in links) < LEAST_BYTES:
            return False
        planned = plan_chain(links, shape_on(self.device)) is not None
        if self._choice == "chain" and not planned and not self._told:
            self._told = True
            log.warning("%s=chain has no effect on weights that are not in FP8 with a scale for each row", ONE_TOKEN)
        return planned


def new_counter(device: torch.device) -> Tensor:
    """Where blocks wait for each other; every launch leaves it as the next one needs it. One for all chains of a
    stream: chains that might overlap must not share it."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def has_kernel(device: torch.device) -> bool:
    """Whether the kernel is written for this device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def shape_on(device: torch.device) -> ChainShape:
    """One block to a multiprocessor of `device`."""
    return ChainShape(torch.cuda.get_device_properties(device).multi_processor_count)


def _check(device: torch.device, owner: object) -> None:
    """Raises `CudaDriverError` or `CudaBuildError` where blocks that wait for each other are not certain to run."""
    if (reason := nvrtc.unavailable()) is not None:
        raise nvrtc.CudaBuildError(reason)
    if exclusive.shares_processors() or nvrtc.is_shared(device):
        raise nvrtc.CudaDriverError("other processes share the multiprocessors (MPS)")
    if not exclusive.claim(device, owner):
        raise nvrtc.CudaDriverError(f"another engine of this process has launches on {device} that need all of it")
