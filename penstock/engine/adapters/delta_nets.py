"""Adapters on the projections of gated delta nets.

What a delta net reads may be one matrix with the gates of its state behind the rest, or two: see `GatedDeltaNet`. In
either case adapters know two linears, so columns of the one matrix are taken apart and put back with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from penstock.engine.adapters.kernel import AdaptedLinear, LoraKernel
from penstock.engine.adapters.layout import (
    DELTA_DECAYS,
    DELTA_GATES,
    DELTA_MIX,
    DELTA_OUTPUT,
    DELTA_OUTPUT_GATES,
    PlacedSite,
)
from penstock.engine.models.layers.delta_net import GatedDeltaNet
from penstock.engine.models.layers.linear import Linear


class _AdaptedColumns:
    """A linear whose columns are the outputs of several sites, one behind the other."""

    def __init__(self, base: Linear, kernel: LoraKernel, *sites: PlacedSite) -> None:
        self.base = base
        self.weight_bytes = base.weight_bytes
        self._kernel = kernel
        self._sites = sites

    def __call__(self, x: Tensor) -> Tensor:
        y, begin = self.base(x), 0
        inputs = self._kernel.banks.inputs
        for placed in self._sites:
            end = begin + placed.site.outputs
            part = y[:, begin:end].contiguous()
            if inputs is not None:

                def columns(rows: Tensor, at: slice = slice(begin, end)) -> Tensor:
                    return self.base(rows)[:, at].contiguous()

                over = inputs.over(columns, placed)
                part = part if over is columns else over(x)
            self._kernel.add(x, part, placed)
            y[:, begin:end] = part
            begin = end
        return y


def adapted_linears(mixer: GatedDeltaNet, kernel: LoraKernel, placed: Mapping[str, PlacedSite]) -> dict[str, Any]:
    """The linears of a delta net with the adapters of `placed`, sites by attribute; none where it has none."""
    if DELTA_MIX not in placed:
        return {}
    found: dict[str, Any] = {"output": AdaptedLinear(mixer.output, kernel, placed[DELTA_OUTPUT])}
    if mixer.gates is None:
        found["mix"] = _AdaptedColumns(mixer.mix, kernel, placed[DELTA_MIX], placed[DELTA_GATES])
    else:
        found["mix"] = AdaptedLinear(mixer.mix, kernel, placed[DELTA_MIX])
        found["gates"] = AdaptedLinear(mixer.gates, kernel, placed[DELTA_GATES])
    for attribute in (DELTA_DECAYS, DELTA_OUTPUT_GATES):
        if attribute in placed:
            found[attribute] = AdaptedLinear(getattr(mixer, attribute), kernel, placed[attribute])
    return found
