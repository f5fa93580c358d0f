"""Stages of a pipeline that need more than the residual stream. See `ModelConfig`."""

from __future__ import annotations

from dataclasses import dataclass

DIGITS = 3
"""Numbers that a token's id becomes; see `models.token_digits`."""


@dataclass(frozen=True, slots=True)
class Carried:
    """What stages of a pipeline pass on of each token beside the residual stream."""

    vectors: int = 0
    """Numbers in what all layers from here on are told of the token; see `TokenInputs`."""
    keys: tuple[tuple[int, int], ...] = ()
    """Layers of the whole model to whose keys and values layers from here on attend, and how many numbers a shard has
    of them."""
    tokens: bool = False
    """Whether layers from here on look up token ids."""

    @property
    def width(self) -> int:
        return self.vectors + sum(width for _, width in self.keys) + DIGITS * self.tokens


@dataclass(frozen=True, slots=True)
class StageConfig:
    """A stage of a pipeline whose layers need more than the residual stream."""

    first: int
    """The layer of the whole model with which it begins."""
    arrives: Carried
    leaves: Carried
    given: tuple[int | None, ...]
    """Of each layer: the one of the whole model whose keys and values it stores, as an earlier stage has projected
    them. Other layers of this stage attend to what it stores."""
