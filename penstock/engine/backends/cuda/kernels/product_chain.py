"""The products between two attentions of one token in one launch, in CUDA C++ (`csrc/product_chain.cu`).

Its blocks wait for each other, so all of them have to be on the device at once: one to a multiprocessor, which has room
for it as soon as the kernels before it have ended. Two chains of a device must not run at the same time (`exclusive`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.engine.backends.cuda import nvrtc
from penstock.engine.backends.cuda.kernels import common
from penstock.engine.backends.cuda.kernels.chain_plan import ENTRY, SOURCE, ChainShape, plan_chain
from penstock.engine.backends.interface import Link


class ProductChain:
    """See `LinkedProducts`. Addresses of tensors are looked up at every call: an engine that sleeps moves them."""

    def __init__(self, links: Sequence[Link], shape: ChainShape, counter: Tensor) -> None:
        """Compiles and loads the kernel, so that a launch cannot fail later. Raises `CudaBuildError`, or
        `CudaDriverError` where its blocks do not all fit: those that are not there would be waited for without end."""
        self.links = tuple(links)
        plan = plan_chain(links, shape)
        if plan is None:
            raise ValueError("there is no kernel for a chain of these products")
        self.plan = plan
        self.counter = counter
        self.kernel = nvrtc.kernel(counter.device, SOURCE, ENTRY, defines=plan.defines, options=plan.options)
        room = self.kernel.resident_blocks(shape.warps * 32, plan.shared_bytes)
        if room < shape.blocks:
            raise nvrtc.CudaDriverError(
                f"the device has room for {room} of the {shape.blocks} blocks that wait for each other"
            )

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """`x` [1, K of the first link]; `residual` [1, hidden] is changed in place. Returns the last link's output
        [1, N], unless that adds to the residual stream."""
        plan = self.plan
        outs = [None if link.residual else x.new_empty((1, link.outputs)) for link in plan.links]
        if not common.is_building():
            self.kernel.launch(
                plan.shape.blocks,
                plan.shape.warps * 32,
                [plan.arguments(self.links, x, residual, outs, self.counter)],
                shared_bytes=plan.shared_bytes,
                overlap=common.overlaps(),
            )
        return outs[-1]
