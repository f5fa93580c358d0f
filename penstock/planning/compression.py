"""Attention to a window and to entries that stand for several tokens (DeepSeek V4), as it is counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Compression:
    """Of all layers; one key of a token, or of an entry, is its value too, for all heads."""

    rates: tuple[int, ...]
    """Tokens of an entry in each layer; 0: there is the window alone."""
    chosen: tuple[bool, ...]
    """Which layers have an indexer; an entry there is made of two groups of tokens."""
    heads: int
    dim: int
    window: int
    query_rank: int
    output_groups: int
    output_rank: int
    index_heads: int
    index_dim: int
    most: int
    """Entries that an indexer chooses."""
    streams: int
    """Residual streams."""

    def by_heads(self, hidden: int) -> int:
        """Parameters of a layer's matrices that have a part for each head, or run of heads."""
        inner = self.heads * self.dim
        return inner * (self.query_rank + self.output_rank) + self.output_groups * self.output_rank * hidden

    def for_all_heads(self, hidden: int, rate: int, chosen: bool) -> int:
        """Parameters of the matrices that all heads share."""
        total = hidden * (self.query_rank + self.dim)
        if rate:
            total += 2 * hidden * self._width(self.dim, chosen)
        if chosen:
            total += 2 * hidden * self._width(self.index_dim, chosen)
            total += self.query_rank * self.index_heads * self.index_dim
        return total

    def others(self, hidden: int, rate: int, chosen: bool) -> int:
        """Parameters beside them, but for sinks: norms, places in a group, index weights, mixing of streams."""
        n = self.streams
        total = self.query_rank + self.dim + 2 * ((2 + n) * n * (n * hidden + 1) + 3)
        if rate:
            total += rate * self._width(self.dim, chosen) + self.dim
        if chosen:
            total += rate * self._width(self.index_dim, chosen) + self.index_dim + hidden * self.index_heads
        return total

    def head(self, hidden: int) -> int:
        """Parameters of what makes one stream of all, behind the last layer."""
        return self.streams * self.streams * hidden + self.streams + 1

    def block_bytes(self, first: int, last: int, block_size: int, element: float, dense: float) -> int:
        """What some layers keep of a block of tokens: entries, and those of indexers as activations are."""
        total = 0
        for rate, chosen in zip(self.rates[first:last], self.chosen[first:last], strict=True):
            places = -(-block_size // rate) if rate else 0
            total += round(places * self.dim * element) + (round(places * self.index_dim * dense) if chosen else 0)
        return total

    def state_bytes(self, first: int, last: int, element: int = 2) -> int:
        """What some layers keep of a sequence, whatever its length: the window's keys, and softmaxes in float32."""
        total = 0
        for rate, chosen in zip(self.rates[first:last], self.chosen[first:last], strict=True):
            total += element * self.window * self.dim
            if rate:
                total += 12 * self._state(self.dim, chosen)
            if chosen:
                total += 12 * self._state(self.index_dim, chosen)
        return total

    def seen(self, context: int) -> int:
        """Elements that the next token reads after `context` tokens."""
        total = 0
        for rate, chosen in zip(self.rates, self.chosen, strict=True):
            entries = context // rate if rate else 0
            total += (min(context, self.window) + (min(entries, self.most) if chosen else entries)) * self.dim
            total += entries * self.index_dim if chosen else 0
        return total

    @staticmethod
    def _width(dim: int, chosen: bool) -> int:
        return 2 * dim if chosen else dim

    @staticmethod
    def _state(dim: int, chosen: bool) -> int:
        """Dimensions of softmaxes: of the running group, and of the one before it where groups overlap."""
        return 3 * dim if chosen else dim
