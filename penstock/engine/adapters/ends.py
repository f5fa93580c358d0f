"""Adapters on the embedding and the head, which stand before and behind all layers.

An adapter of the embedding adds B times a column of A, that of the token. One of the head adds to logits, which are
computed for some tokens of a step: which adapters those use is said behind the pass (`LoraKernel.begin_head`). Where an
adapter replaces rows of these matrices (`adapters.rows`), what it adds comes on top.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock.engine.adapters.kernel import AdaptedLinear, LoraKernel
from penstock.engine.adapters.layout import EMBEDDING, HEAD, AdapterLayout, PlacedSite
from penstock.engine.adapters.rows import RowBank
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.linear import Linear, Scaled, SoftCapped, shaped
from penstock.engine.models.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class EmbeddingAdapters:
    """See `EmbeddedTokens`."""

    kernel: LoraKernel
    placed: PlacedSite

    def known(self, token_ids: Tensor) -> Tensor:
        return token_ids if self.kernel.banks.rows is None else self.kernel.banks.rows.known(token_ids)

    def __call__(self, token_ids: Tensor, stream: Tensor) -> None:
        rows = self.kernel.banks.rows
        if rows is None:
            self.kernel.add_embedding(token_ids, stream, self.placed)
            return
        rows.replace_embedding(token_ids, stream)
        self.kernel.add_embedding(rows.known(token_ids), stream, self.placed)
        rows.replace_embedding(token_ids, stream, added=True)


class AdaptedHead(AdaptedLinear):
    """A head, then the adapters of the tokens whose logits they are."""

    def __call__(self, x: Tensor) -> Tensor:
        y = self.base(x)
        if self._kernel.banks.rows is not None:
            self._kernel.banks.rows.replace_logits(x, y)
        self._kernel.add_head(x, y, self._placed)
        return y


class BoundedHead:
    """A head, then logits for those tokens that each row's adapter has, and no others."""

    weight_bytes = 0

    def __init__(self, base: Linear, rows: RowBank, config: ModelConfig) -> None:
        self._base = base
        self._rows = rows
        self._shaped = shaped(_AsGiven(), config.logit_scale, config.logit_softcap)

    def __call__(self, x: Tensor) -> Tensor:
        return self._rows.bound_logits(x, self._base(x), self._shaped)


class _AsGiven:
    """Stands for a head, in what a family does to logits."""

    weight_bytes = 0

    def __call__(self, x: Tensor) -> Tensor:
        return x


def adapt_ends(decoder: Decoder, kernel: LoraKernel, layout: AdapterLayout) -> Decoder:
    """`decoder` with adapters on embedding and head, where the layout has these."""
    places = {site.attribute: layout.place(0, index) for index, site in enumerate(layout.sites) if site.end}
    if not places or not layout.ends:
        return decoder
    head = bare_head(decoder.head, lambda base: AdaptedHead(base, kernel, places[HEAD]))
    return dataclasses.replace(decoder, head=head, embedded=EmbeddingAdapters(kernel, places[EMBEDDING]))


def bare_head(head: Linear, change: Callable[[Linear], Linear]) -> Linear:
    """`head` with the matrix in it changed, inside of what its family does to the logits."""
    if isinstance(head, Scaled):
        return Scaled(bare_head(head.linear, change), head.factor)
    if isinstance(head, SoftCapped):
        return SoftCapped(bare_head(head.linear, change), head.cap)
    return change(head)
