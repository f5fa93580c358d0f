"""Parts of layers that ask the memory early for the weights of the parts behind them.

A step of one token reads every weight once, and attention and routing leave the memory idle meanwhile. What they may
ask for is decided here, by the order of parts; whether and how a backend asks is its own affair.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from penstock.engine.models.decoder import DecoderLayer
from penstock.engine.models.layers.linear import matrices


@runtime_checkable
class AsksAhead(Protocol):
    """A part that can do so."""

    def asking_for(self, ahead: tuple[Tensor, ...]) -> Any:
        """The same part, which is followed by one that reads these matrices first."""
        ...


def asking_ahead(layers: Sequence[DecoderLayer]) -> list[DecoderLayer]:
    """The same layers, their parts asking for what comes next."""
    after = [*(_first(layer.mixer) for layer in layers[1:]), ()]
    return [
        dataclasses.replace(
            layer,
            mixer=_asking(layer.mixer, _first(layer.feed_forward)),
            feed_forward=_asking(layer.feed_forward, following),
        )
        for layer, following in zip(layers, after, strict=True)
    ]


def _asking(part: Any, ahead: tuple[Tensor, ...]) -> Any:
    return part.asking_for(ahead) if isinstance(part, AsksAhead) else part


def _first(part: Any) -> tuple[Tensor, ...]:
    """The matrix that a part reads first, whatever its input is."""
    linears = getattr(part, "shared", part).linears
    return matrices(*linears[:1])
