"""The weights of a layer's experts as stacks that the grouped kernels read, for `experts`: plain ones, and in MXFP4.

Those in integers are in `expert_integers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.engine.backends.cuda.block_fp8_linear import BlockFp8Linear
from penstock.engine.backends.cuda.expert_integers import IntegerStack, integer_stack
from penstock.engine.backends.cuda.grouped_linear import Int8Linear
from penstock.engine.backends.cuda.kernels import moe, moe_mxfp4
from penstock.engine.backends.cuda.kernels.matmul import BatchInvariantLinear
from penstock.engine.backends.cuda.kernels.moe import SharedPart
from penstock.engine.backends.cuda.kernels.moe_plan import FewPairs, Plan
from penstock.engine.backends.cuda.kernels.mxfp4_fragments import Mxfp4Fragments, fragments, stacked
from penstock.engine.backends.cuda.linear import CudaLinear
from penstock.engine.backends.cuda.mxfp4_linear import Mxfp4Linear
from penstock.engine.backends.interface import Activation
from penstock.engine.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class Stack:
    """One matrix of every expert [experts, out, in], with scales [experts, out] when it is FP8 or int8, and biases
    [experts, out] where they have them."""

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None
    tile: tuple[int, int] | None = None
    """Outputs and inputs that share a scale: these are [experts, out / tile, in / tile] then."""

    @property
    def form(self) -> tuple[object, ...]:
        """Equal for stacks of equal shapes that launch the same kernels."""
        return self.weight.dtype, self.tile

    @property
    def experts(self) -> int:
        return self.weight.shape[0]

    @property
    def weight_bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    @property
    def outputs(self) -> int:
        return self.weight.shape[1]

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def product(
        self,
        x: Tensor,
        schedule: Plan | FewPairs,
        top_k: int,
        gate: Activation | None,
        route_weights: Tensor | None,
        counters: Tensor,
        fixed: bool = False,
        shared: SharedPart | None = None,
    ) -> Tensor:
        """See `moe.grouped_linear`. `fixed`: in the one launch shape of deterministic mode."""
        return moe.grouped_linear(
            x,
            self.weight,
            schedule,
            top_k,
            gated=gate is not None,
            weight_scale=self.scale,
            scale_tile=self.tile,
            bias=self.bias,
            route_weights=route_weights,
            activation=gate or "silu",
            counters=counters,
            shared=shared,
            config=moe.fixed(gate is not None, x.element_size()) if fixed else None,
        )

    def put(self, index: int, linear: Linear) -> None:
        """Another expert's matrix, of the same form."""
        plain = _plain(linear)
        assert plain is not None
        self.weight.view(torch.uint8)[index].copy_(plain.weight.view(torch.uint8))
        for ours, theirs in ((self.scale, plain.scale), (self.bias, plain.bias)):
            if ours is not None and theirs is not None:
                ours[index].copy_(theirs)


@dataclass(frozen=True, slots=True)
class PackedStack:
    """The same in MXFP4."""

    stack: Mxfp4Fragments
    bias: Tensor | None

    @property
    def form(self) -> tuple[object, ...]:
        return ("mxfp4",)

    @property
    def parts(self) -> tuple[Mxfp4Fragments, Tensor | None]:
        return self.stack, self.bias

    @property
    def experts(self) -> int:
        return self.stack.words.shape[0]

    @property
    def weight_bytes(self) -> int:
        return self.stack.nbytes

    @property
    def outputs(self) -> int:
        return self.stack.outputs

    @property
    def device(self) -> torch.device:
        return self.stack.words.device

    def product(
        self,
        x: Tensor,
        schedule: Plan | FewPairs,
        top_k: int,
        gate: Activation | None,
        route_weights: Tensor | None,
        counters: Tensor,
        fixed: bool = False,
    ) -> Tensor:
        return moe_mxfp4.grouped_linear(
            x,
            self.stack,
            self.bias,
            schedule,
            top_k,
            gated=gate is not None,
            route_weights=route_weights,
            activation=gate or "silu",
            counters=counters,
            fixed=fixed,
        )

    def put(self, index: int, linear: Linear) -> None:
        assert isinstance(linear, Mxfp4Linear)
        self.stack.put(index, fragments(linear.weight, paired=self.stack.paired))
        if self.bias is not None and linear.bias is not None:
            self.bias[index].copy_(linear.bias)


AnyStack: TypeAlias = Stack | PackedStack | IntegerStack


_Plain: TypeAlias = CudaLinear | BlockFp8Linear | BatchInvariantLinear


def _plain(linear: Linear) -> _Plain | None:
    """The linear whose weights are read a row at a time; activations of experts are never rounded."""
    if isinstance(linear, Int8Linear):
        return linear.few
    return linear if isinstance(linear, _Plain) else None


def stack_of(linears: list[Linear], *, paired: bool) -> AnyStack | None:
    """The matrices of a layer's experts together; None where the kernels do not read their form. `paired`: see
    `Mxfp4Fragments`."""
    packed = [linear for linear in linears if isinstance(linear, Mxfp4Linear)]
    if len(packed) == len(linears):
        biases = [linear.bias for linear in packed if linear.bias is not None]
        together = stacked([fragments(linear.weight, paired=paired) for linear in packed])
        return PackedStack(together, torch.stack(biases) if biases else None)
    integers = integer_stack(linears)
    if integers is not None:
        return integers
    parts = [part for part in map(_plain, linears) if part is not None]
    tiles = {getattr(part, "tile", None) for part in parts}
    if len(tiles) > 1 or len({part.weight.dtype for part in parts}) > 1:
        return None
    scales = [part.scale for part in parts if part.scale is not None]
    biases = [part.bias for part in parts if part.bias is not None]
    if len(parts) != len(linears) or any(len(found) not in (0, len(parts)) for found in (scales, biases)):
        return None
    # Stacked as bytes: not every operation knows FP8.
    weight = torch.stack([part.weight.view(torch.uint8) for part in parts]).view(parts[0].weight.dtype)
    bias = torch.stack(biases) if biases else None
    return Stack(weight, torch.stack(scales) if scales else None, bias, tiles.pop() if tiles else None)
