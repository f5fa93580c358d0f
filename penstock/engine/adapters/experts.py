"""Adapters on a mixture of experts: its router, the expert that every token visits, and the others.

A visit is a token at one of its experts. The experts of a layer compute all visits as ever, and hand what their linears
read and gave to `LoraKernel.add_visits`, which knows the adapter of each row and the expert whose matrices to use.
Vectors and rotations of experts are those of `adapters.visits`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.adapters.kernel import AdaptedLinear, LoraKernel
from penstock.engine.adapters.layout import (
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    LATENT_IN,
    LATENT_OUT,
    ROUTER,
    SHARED,
    SHARED_GATE,
    PlacedSite,
)
from penstock.engine.backends.interface import Ops
from penstock.engine.models.layers.experts import (
    ApartExperts,
    ExpertSlots,
    ExpertSource,
    NarrowExperts,
    Router,
    SharedAndRouted,
)
from penstock.engine.models.layers.feed_forward import FeedForward, GatedMlp
from penstock.engine.models.layers.linear import Linear

Base = Callable[[Tensor], Tensor]
"""What linears make of rows that are in the order of visits."""


@dataclass(frozen=True, slots=True)
class _Visits:
    """The adapters of a layer's visits; see `Additions`."""

    kernel: LoraKernel
    placed_gate_up: PlacedSite
    placed_down: PlacedSite
    slots: Tensor
    """int64 [pairs]: -1 where there is no adapter, or the expert is elsewhere."""
    experts: Tensor
    """int64 [pairs], counted in the whole layer."""

    def gate_up(self, x: Tensor, base: Base, pairs: Tensor | None = None) -> Tensor:
        return self._apply(x, base, self.placed_gate_up, pairs, None)

    def down(self, x: Tensor, base: Base, pairs: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        return self._apply(x, base, self.placed_down, pairs, weights)

    def _apply(self, x: Tensor, base: Base, placed: PlacedSite, pairs: Tensor | None, weights: Tensor | None) -> Tensor:
        of, changes = self._of(pairs), self.kernel.banks.visits
        y = base(x) if changes is None else changes.over(base, x, placed, *of)
        self.kernel.add_visits(x, y, placed, *of, weights)
        if changes is not None:
            changes.alter(y, placed, *of, weights)
        return y

    def _of(self, pairs: Tensor | None) -> tuple[Tensor, Tensor]:
        return (self.slots, self.experts) if pairs is None else (self.slots[pairs], self.experts[pairs])


@dataclass(frozen=True, slots=True)
class AdaptedExperts:
    """Experts with the adapters of their tokens; see `Experts`."""

    base: Any
    """`Experts` of any backend; its router may be adapted."""
    kernel: LoraKernel
    gate_up: PlacedSite
    down: PlacedSite

    @property
    def ops(self) -> Ops:
        ops: Ops = self.base.ops
        return ops

    @property
    def router(self) -> Router:
        router: Router = self.base.router
        return router

    @property
    def slots(self) -> ExpertSlots | None:
        slots: ExpertSlots | None = self.base.slots
        return slots

    @property
    def source(self) -> ExpertSource:
        source: ExpertSource = self.base.source
        return source

    @property
    def linears(self) -> tuple[Linear, ...]:
        linears: tuple[Linear, ...] = self.base.linears
        return linears

    @property
    def weight_bytes(self) -> int:
        size: int = self.base.weight_bytes
        return size

    @property
    def adapters(self) -> Tensor:
        """int32 [T]: the slot of each token's adapter, which goes with it where experts are on other ranks."""
        return self.kernel.token_slots

    def forward(self, x: Tensor, inputs: Tensor | None = None) -> Tensor:
        weights, chosen = self.choose(x)
        chosen = chosen if self.slots is None else self.slots.here(chosen)
        return self.apply(x if inputs is None else inputs, weights, chosen)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen: tuple[Tensor, Tensor] = self.base.choose(x)
        return chosen

    def apply(self, x: Tensor, weights: Tensor, chosen: Tensor, adapters: Tensor | None = None) -> Tensor:
        """`adapters`: of the rows of `x`, where these are not the step's own tokens."""
        of = (self.adapters if adapters is None else adapters).long().unsqueeze(1).expand_as(chosen).flatten()
        experts = chosen.flatten().long()
        if self.slots is not None:
            of = torch.where(experts < self.slots.size, of, -1)
            experts = self.slots.held[experts]
        out: Tensor = self.base.apply(x, weights, chosen, _Visits(self.kernel, self.gate_up, self.down, of, experts))
        return out

    def replace(self, slot: int, expert: GatedMlp) -> None:
        self.base.replace(slot, expert)


def adapt_experts(
    feed_forward: FeedForward, kernel: LoraKernel, placed: Mapping[str, PlacedSite], ops: Ops
) -> FeedForward:
    """A feed-forward of experts with the adapters of `placed`, sites by attribute."""

    def linear(base: Linear, attribute: str) -> Linear:
        site = placed.get(attribute)
        return base if site is None else AdaptedLinear(base, kernel, site)

    if isinstance(feed_forward, SharedAndRouted | ApartExperts):
        shared = dataclasses.replace(
            feed_forward.shared,
            ops=ops,
            gate_up=linear(feed_forward.shared.gate_up, f"{SHARED}gate_up"),
            down=linear(feed_forward.shared.down, f"{SHARED}down"),
        )
        routed = adapt_experts(feed_forward.routed, kernel, placed, ops)
        if isinstance(feed_forward, ApartExperts):
            return dataclasses.replace(feed_forward, routed=routed, shared=shared)
        return SharedAndRouted(
            routed=routed,
            shared=shared,
            gate=None if feed_forward.gate is None else linear(feed_forward.gate, SHARED_GATE),
            sigmoid=feed_forward.sigmoid,
        )
    if isinstance(feed_forward, NarrowExperts):
        return dataclasses.replace(
            feed_forward,
            routed=adapt_experts(feed_forward.routed, kernel, placed, ops),
            into=linear(feed_forward.into, LATENT_IN),
            out=linear(feed_forward.out, LATENT_OUT),
        )
    base: Any = feed_forward
    router: Router = base.router
    base = dataclasses.replace(base, router=dataclasses.replace(router, linear=linear(router.linear, ROUTER)))
    if EXPERT_GATE_UP not in placed:
        return base  # type: ignore[no-any-return]
    return AdaptedExperts(base, kernel, placed[EXPERT_GATE_UP], placed[EXPERT_DOWN])
