"""The products between two attentions of one token in one launch, in CUDA C++ (`csrc/product_chain.cu`).

Its blocks wait for each other, so all of them have to be on the device at once: one to a multiprocessor, which has room
for it as soon as the kernels before it have ended. Two chains of a device must not run at the same time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from penstock.engine.backends.cuda import nvrtc
from penstock.engine.backends.cuda.kernels import common
from penstock.engine.backends.cuda.kernels.chain_plan import ENTRY, SOURCE, ChainShape, plan_chain
from penstock.engine.backends.cuda.kernels.mxfp4_one import shares_processors
from penstock.engine.backends.cuda.trials import ONE_TOKEN
from penstock.engine.backends.interface import Link

log = logging.getLogger(__name__)


def applies(links: Sequence[Link], device: torch.device) -> bool:
    """Whether `ProductChain` computes these links on `device`."""
    return available(device) and plan_chain(links, shape_on(device)) is not None


@cache
def available(device: torch.device) -> bool:
    """Whether chains run on `device` at all; says why they do not."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        log.warning("%s=chain has no effect: its kernel is for compute capability 9.0", ONE_TOKEN)
        return False
    if shares_processors():
        log.warning("%s=chain has no effect: other processes share the multiprocessors (MPS)", ONE_TOKEN)
        return False
    if (reason := nvrtc.unavailable()) is not None:
        log.warning("%s=chain has no effect: %s", ONE_TOKEN, reason)
        return False
    return True


@cache
def shape_on(device: torch.device) -> ChainShape:
    """One block to a multiprocessor of `device`."""
    return ChainShape(torch.cuda.get_device_properties(device).multi_processor_count)


def new_counter(device: torch.device) -> Tensor:
    """Where blocks wait for each other; every launch leaves it as the next one needs it. One for all chains of a
    stream: chains that might overlap must not share it."""
    return torch.zeros(1, dtype=torch.int32, device=device)


class ProductChain:
    """See `LinkedProducts`. Addresses of tensors are looked up at every call: an engine that sleeps moves them."""

    def __init__(self, links: Sequence[Link], shape: ChainShape | None = None, counter: Tensor | None = None) -> None:
        self.links = tuple(links)
        device = links[0].weight.device
        plan = plan_chain(links, shape or shape_on(device))
        if plan is None:
            raise ValueError("there is no kernel for a chain of these products")
        self.plan = plan
        self._fits = False
        self.counter = new_counter(device) if counter is None else counter

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """`x` [1, K of the first link]; `residual` [1, hidden] is changed in place. Returns the last link's output
        [1, N], unless that adds to the residual stream."""
        plan, device = self.plan, x.device
        kernel = nvrtc.kernel(device, SOURCE, ENTRY, defines=plan.defines, options=plan.options)
        outs = [None if link.residual else x.new_empty((1, link.outputs)) for link in plan.links]
        if not common.is_building():
            if not self._fits:
                self._check_room(kernel)
            kernel.launch(
                plan.shape.blocks,
                plan.shape.warps * 32,
                [plan.arguments(self.links, x, residual, outs, self.counter)],
                shared_bytes=plan.shared_bytes,
                overlap=common.overlaps(),
            )
        return outs[-1]

    def _check_room(self, kernel: nvrtc.Kernel) -> None:
        """Blocks that are not there would be waited for without end."""
        wanted, room = (
            self.plan.shape.blocks,
            kernel.resident_blocks(self.plan.shape.warps * 32, self.plan.shared_bytes),
        )
        if room < wanted:
            raise nvrtc.CudaDriverError(
                f"{ONE_TOKEN}=chain: the device has room for {room} of the {wanted} blocks that wait for each other; "
                f"start without {ONE_TOKEN}"
            )
        self._fits = True
