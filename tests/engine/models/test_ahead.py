"""Which matrices the parts of layers ask for before the parts behind them read these."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.engine.models.ahead import asking_ahead
from penstock.engine.models.decoder import DecoderLayer


@dataclass(frozen=True)
class Matrix:
    weight: Tensor | None


@dataclass(frozen=True)
class Part:
    """One that asks."""

    linears: tuple[Matrix, ...]
    ahead: tuple[Tensor, ...] = ()

    def asking_for(self, ahead: tuple[Tensor, ...]) -> Part:
        return replace(self, ahead=ahead)


@dataclass(frozen=True)
class Silent:
    """One that does not."""

    linears: tuple[Matrix, ...]


@dataclass(frozen=True)
class WithShared(Part):
    """Experts: the router is small, and the shared expert's weights are what is read whatever the token."""

    shared: Any = None


def matrix() -> Matrix:
    return Matrix(torch.zeros(2, 2))


def layer(mixer: Any, feed_forward: Any) -> DecoderLayer:
    return DecoderLayer(torch.zeros(2), mixer, torch.zeros(2), feed_forward)


def test_parts_ask_for_the_first_matrix_behind_them() -> None:
    shared = Part((matrix(), matrix()))
    layers = [
        layer(Part((matrix(), matrix())), WithShared((matrix(),), shared=shared)),
        layer(Silent((matrix(),)), Part((matrix(), matrix()))),
        layer(Part((Matrix(None),)), Part((matrix(),))),
    ]
    first, second, third = asking_ahead(layers)
    assert _same(first.mixer, shared.linears[0].weight)
    assert _same(first.feed_forward, layers[1].mixer.linears[0].weight)  # type: ignore[attr-defined]
    assert second.mixer is layers[1].mixer
    assert _same(second.feed_forward)  # a matrix in another form is not asked for
    assert _same(third.mixer, layers[2].feed_forward.linears[0].weight)  # type: ignore[attr-defined]
    assert _same(third.feed_forward)


def _same(part: Any, *expected: Tensor | None) -> bool:
    return len(part.ahead) == len(expected) and all(a is b for a, b in zip(part.ahead, expected, strict=True))
