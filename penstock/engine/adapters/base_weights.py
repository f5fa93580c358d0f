"""Whether whole matrices in an adapter's file are the model's own.

PEFT saves the embedding and the head beside an adapter that targets one of them, unchanged. If they were changed (new
tokens, other values), the adapter cannot be applied to this model. Rows are compared by a digest of their bfloat16
values, so that nothing has to be read from the device while it works.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.engine.adapters.ends import bare_head
from penstock.engine.adapters.layout import EMBEDDING, HEAD, AdapterLayout
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.linear import Linear

_AT_ONCE = 1 << 22
"""Numbers that are widened at the same time."""


class BaseWeights:
    """The embedding and the head of a model, as far as they are kept as they were stored."""

    def __init__(self, decoder: Decoder, layout: AdapterLayout, *, lazy: bool) -> None:
        """`lazy`: the tensors are in host memory, and may be read whenever they are asked for."""
        self._dtype = decoder.embedding.dtype
        self._factors = {site.attribute: site.factor for site in layout.sites}
        self._digests: dict[str, Callable[[], Tensor]] = {}
        for name, weight in ((EMBEDDING, decoder.embedding), (HEAD, _matrix(decoder.head))):
            if weight is not None and weight.dtype is self._dtype and layout.ends:
                self._digests[name] = _later(weight) if lazy else _now(weight)

    def has(self, attribute: str, rows: Tensor, first: int = 0) -> bool:
        """Whether these are the rows of a matrix from `first` on; True where that cannot be known."""
        known = self._digests.get(attribute)
        if known is None:
            return True
        kept = rows.to(self._dtype)
        factor = self._factors[attribute]
        return torch.equal(row_digests(kept if factor == 1.0 else kept * factor), known()[first : first + len(rows)])


def row_digests(matrix: Tensor) -> Tensor:
    """int64 [rows]: sums over the bits of each row's bfloat16 values, each times a number of its own. On the host."""
    columns = matrix.shape[1]
    generator = torch.Generator().manual_seed(1)
    factors = torch.randint(1 << 62, (columns,), generator=generator).mul_(2).add_(1).to(matrix.device)
    step = max(1, _AT_ONCE // columns)
    parts = [
        ((piece.to(torch.bfloat16) + 0.0).view(torch.int16).long() * factors).sum(1)
        for piece in torch.split(matrix, step)
    ]
    return torch.cat(parts).cpu()


def _now(weight: Tensor) -> Callable[[], Tensor]:
    digests = row_digests(weight)
    return lambda: digests


def _later(weight: Tensor) -> Callable[[], Tensor]:
    return lambda: row_digests(weight)


def _matrix(head: Linear) -> Tensor | None:
    found: list[Linear] = []

    def seen(linear: Linear) -> Linear:
        found.append(linear)
        return linear

    bare_head(head, seen)
    weight = getattr(found[0], "weight", None)
    return weight if isinstance(weight, Tensor) and weight.dim() == 2 else None
