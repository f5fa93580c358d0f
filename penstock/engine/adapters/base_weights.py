"""Which rows of whole matrices in an adapter's file are not the model's own.

PEFT saves the embedding and the head beside an adapter that targets one of them, unchanged, and those that were trained
as a whole. Rows of the embedding are compared with those in host memory, or by a digest of their values; those of the
head, which may be kept in few bits, by their products with a few random vectors, or, if they were trained, not at all.
What is needed for that is taken when the model is loaded, so that nothing has to be read from the device while it
works.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.adapters.ends import bare_head
from penstock.engine.adapters.layout import EMBEDDING, AdapterLayout
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.normed_rows import normed_rows

_AT_ONCE = 1 << 22
"""Numbers that are widened at the same time."""
_PROBES = 16
_CLOSE, _CLOSE_IN_FEW_BITS = 0.05, 0.3
"""How far products of a row may be apart, in units of its length: the mean over the probes."""


class BaseWeights:
    """See `KnownMatrices`. `_tied`: this rank has the whole head, and it is the embedding."""

    def __init__(self, decoder: Decoder, layout: AdapterLayout, *, lazy: bool, as_stored: bool) -> None:
        """`lazy`: the embedding is in host memory, and may be read whenever it is asked for; `as_stored`: it has the
        values that it was trained with."""
        self._embedding = decoder.embedding if lazy and layout.ends else None
        self._factor = next((site.factor for site in layout.sites if site.attribute == EMBEDDING), 1.0)
        self._norm_eps = next((site.norm_eps for site in layout.sites if site.attribute == EMBEDDING), None)
        self._digests = None if lazy or not layout.ends else row_digests(decoder.embedding)
        self._as_stored = as_stored
        vocabulary = {site.inputs if site.attribute == EMBEDDING else site.outputs for site in layout.sites if site.end}
        self._tied = layout.tied and len(vocabulary) == 1
        self._dtype, hidden = decoder.embedding.dtype, decoder.embedding.shape[1]
        self._probes = torch.randn(_PROBES, hidden, generator=torch.Generator().manual_seed(2))
        self._probes = self._probes.to(self._dtype).float()
        self._logits, self._close = None, _CLOSE
        if layout.ends:
            head = _matrix(decoder.head)
            logits = head(self._probes.to(self._dtype).to(decoder.embedding.device))
            self._logits = logits.float().cpu()
            dense = head.weight_bytes >= 2 * logits.shape[1] * hidden
            self._close = _CLOSE if dense else _CLOSE_IN_FEW_BITS

    def changed(self, attribute: str, rows: Tensor, *, trained: bool) -> Tensor:
        if attribute == EMBEDDING:
            return self._of_embedding(rows, trained, self._factor, self._norm_eps)
        if not trained:
            return self._of_head(rows)
        if self._tied and self._factor == 1.0 and self._norm_eps is None:
            return self._of_embedding(rows, trained, 1.0, None)
        return torch.arange(len(rows))  # nearly all change in training

    def _of_embedding(self, rows: Tensor, trained: bool, factor: float, norm_eps: float | None) -> Tensor:
        known = self._embedding if self._embedding is not None else self._digests
        if not self._as_stored or known is None:
            return torch.arange(len(rows) if trained else 0)
        found = []
        step = max(1, _AT_ONCE // rows.shape[1])
        for begin in range(0, len(rows), step):
            kept = rows[begin : begin + step].to(self._dtype)
            kept = kept if factor == 1.0 else kept * factor
            kept = kept if norm_eps is None else normed_rows(kept, norm_eps)
            own = known[begin : begin + len(kept)]
            differs = (kept != own).any(1) if self._embedding is not None else row_digests(kept) != own
            found.append(differs.nonzero().flatten() + begin)
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)

    def _of_head(self, rows: Tensor) -> Tensor:
        if self._logits is None:
            return torch.empty(0, dtype=torch.int64)
        step = max(1, _AT_ONCE // rows.shape[1])
        found = [torch.empty(0, dtype=torch.int64)]
        for begin in range(0, len(rows), step):
            piece = rows[begin : begin + step].float()
            apart = (self._probes @ piece.t() - self._logits[:, begin : begin + len(piece)]).abs().mean(0)
            found.append((apart > self._close * piece.norm(dim=1) + 1e-6).nonzero().flatten() + begin)
        return torch.cat(found)


def row_digests(matrix: Tensor) -> Tensor:
    """int64 [rows]: sums over the bits of each row's values, each times a number of its own. On the host."""
    columns = matrix.shape[1]
    generator = torch.Generator().manual_seed(1)
    factors = torch.randint(1 << 62, (columns,), generator=generator).mul_(2).add_(1).to(matrix.device)
    parts = [
        ((piece + 0.0).view(torch.int16 if piece.element_size() == 2 else torch.int32).long() * factors).sum(1)
        for piece in torch.split(matrix, max(1, _AT_ONCE // columns))
    ]
    return torch.cat(parts).cpu()


def _matrix(head: Linear) -> Linear:
    """Without what the family does to the logits."""
    found: list[Linear] = []

    def seen(linear: Linear) -> Linear:
        found.append(linear)
        return linear

    bare_head(head, seen)
    return found[0]
