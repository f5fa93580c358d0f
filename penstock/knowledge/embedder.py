"""The interface of embedding models for collections. The gateway's encoders implement it; tests use a small one.

Vectors have length one, so that a dot product is a cosine. Texts longer than the model's window are cut by it;
chunks are made to fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EmbedderFacts:
    """Facts about a running model: the length of its vectors, and the maximum tokens of a text."""

    dimensions: int
    window: int
    tokenizer: str = ""
    """The folder of its tokenizer, which reader processes load; empty: they count words."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """A vector per text (one row each), and for each text one per token of `Embedder.tokens`, fewer if truncated."""

    vectors: Vectors
    by_token: list[Vectors]


class Embedder(Protocol):
    @property
    def name(self) -> str:
        """The model; vectors of different models are never compared."""

    async def facts(self) -> EmbedderFacts:
        """Waits until the model is up."""

    def tokens(self, texts: Sequence[str]) -> list[list[str]]:
        """The model's tokens of texts as it spells them, without the marks of beginning and end. Call `facts` first;
        long texts belong into a thread."""

    async def embed(self, texts: Sequence[str], *, bulk: bool = False) -> Embedded:
        """`bulk`: yields to other requests."""
