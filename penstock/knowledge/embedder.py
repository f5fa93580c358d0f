"""What knowledge asks of an embedding model. The gateway's own encoders are such models; tests bring a small one.

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
    """What is known once the model is up: the length of its vectors, and the most tokens of one text."""

    dimensions: int
    window: int


@dataclass(frozen=True, slots=True)
class Embedded:
    """A vector per text, a row each; and for each text one per token of `Embedder.tokens`, fewer when it was cut."""

    vectors: Vectors
    by_token: list[Vectors]


class Embedder(Protocol):
    @property
    def name(self) -> str:
        """The model; vectors of different models are never compared."""

    async def facts(self) -> EmbedderFacts:
        """Waits for the model to be up."""

    def tokens(self, text: str) -> list[str]:
        """The model's tokens of a text as it spells them, without the marks of beginning and end. Call `facts` first;
        long texts belong into a thread."""

    async def embed(self, texts: Sequence[str], *, bulk: bool = False) -> Embedded:
        """`bulk`: others may go first."""
