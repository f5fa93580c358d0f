"""Residual streams that are read through gates, attention to chosen blocks and n-gram embeddings (Qwen4), as they are
counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatedStreams:
    """Of all layers."""

    count: int
    rank: int
    """Of the gates."""
    index_heads: int
    index_dim: int
    rate: int
    """Tokens of a block that an indexer scores."""
    tables: tuple[int, ...]
    """Rows of n-grams of each layer; 0: it has none."""
    told: int
    """Numbers that a layer with n-grams is told of a token."""
    row: int
    """Numbers of a row."""
    taps: int
    before: int
    """Tokens of a sequence whose ids are kept."""
    reach: int
    """Tokens of which the inputs of the convolution are kept."""

    def around(self, hidden: int) -> tuple[int, int]:
        """Parameters of a layer's connections: matrices, and others."""
        width = self.count * hidden
        return 2 * width * (2 * self.rank + self.count), 2 * width

    def head(self, hidden: int) -> int:
        """Parameters of what makes one stream of all, behind the last layer."""
        width = self.count * hidden
        return width * (2 * self.rank + 1)

    def index(self, hidden: int) -> tuple[int, int]:
        """Parameters of an indexer: the matrix, and norms."""
        return hidden * (self.index_heads + 1) * self.index_dim, 2 * self.index_dim

    def ngrams(self, hidden: int) -> tuple[int, int]:
        """Parameters of a layer with n-grams beside its table: matrices, and others."""
        width = self.count * hidden
        return self.told * (width + hidden), width * (3 + self.taps)

    @property
    def table(self) -> int:
        """Numbers of all tables, which stay in host memory."""
        return sum(self.tables) * self.row

    def block_bytes(self, attending: int, block_size: int, dense: float) -> int:
        """What so many layers with attention keep of a block of tokens beside keys and values."""
        return round(attending * (block_size + -(-block_size // self.rate)) * self.index_dim * dense)

    def state_bytes(self, first: int, last: int, hidden: int, element: int = 2) -> int:
        """What some layers keep of a sequence for n-grams: ids, and inputs of the convolution."""
        layers = sum(rows > 0 for rows in self.tables[first:last])
        return layers * (8 * self.before + element * self.reach * self.count * hidden)
