"""Rows of embedding and head that adapters replace: matrices trained as a whole, and rows of single tokens.

What differs from the model's own matrices is kept row by row, in every slot. A step whose adapters replace rows is
launched from the host, which knows the tokens of each slot: it computes what the model does, then writes over the
stream of such tokens and over the logits of such rows. Recorded and captured steps contain none of this. On a device
with memory of its own, slots have room for a number of rows that was reserved when the engine started.

Tokens of an adapter's own come behind the model's vocabulary. Logits are then wider, and -inf there for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ReplacedRows:
    """Some rows of a matrix, in host memory."""

    ids: Tensor
    """int64 [n], ascending: which rows."""
    values: Tensor
    """[n, hidden]."""

    def pinned(self) -> ReplacedRows:
        return ReplacedRows(self.ids.pin_memory(), self.values.pin_memory())


@dataclass(frozen=True, slots=True)
class EndRows:
    """What an adapter replaces of embedding and head. Of the head: of this rank's part, and counted in it."""

    embedding: ReplacedRows | None = None
    head: ReplacedRows | None = None
    added: ReplacedRows | None = None
    """Of the head: rows of tokens behind the model's vocabulary, by their numbers in that of the adapter."""
    tokens: int | None = None
    """How many tokens its head has, where these are not the model's: the others have no logits."""
    virtual: int = 0
    """How many tokens it puts before every prompt: the only rows that it has then, of the ids behind the model's."""

    def has(self, tokens: Iterable[int], vocabulary: int) -> bool:
        """Whether it has rows for all of these that are behind the model's vocabulary."""
        behind = {token for token in tokens if token >= vocabulary}
        return not behind or (self.embedding is not None and behind <= set(self.embedding.ids.tolist()))

    def pinned(self) -> EndRows:
        embedding, head, added = (
            None if rows is None else rows.pinned() for rows in (self.embedding, self.head, self.added)
        )
        return EndRows(embedding, head, added, self.tokens, self.virtual)


@dataclass(frozen=True, slots=True)
class _Held:
    """The rows of one slot, on the device."""

    table: Tensor | None = None
    """int32 [vocabulary]: where the row of each token is; -1: it is the model's own."""
    rows: Tensor | None = None
    head_ids: Tensor | None = None
    head_rows: Tensor | None = None
    added_ids: Tensor | None = None
    added_rows: Tensor | None = None
    tokens: int | None = None


class RowBank:
    """The rows of all slots. `begin` and `begin_head` are those of `LoraKernel`."""

    def __init__(
        self,
        slots: int,
        vocabulary: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        most: int | None = None,
        room: int = 0,
        one_by_one: bool = False,
    ) -> None:
        """`most`: rows of each end that a slot has room for; None: the device's memory is the host's, where adapters
        are. `room`: tokens that adapters may have behind the vocabulary. `one_by_one`: what a token gets does not
        depend on the others of its step."""
        self.most = most
        self._held: list[_Held | None] = [None] * slots
        self._vocabulary, self.room = vocabulary, room
        self._device = device
        self._one_by_one = one_by_one
        self._groups: list[tuple[_Held, Tensor]] = []
        self._head_groups: list[tuple[_Held, Tensor]] = []
        self._rows = self._head_rows = self._tables = self._ids = self._added_rows = None
        if most is not None:
            self._rows, self._head_rows = torch.empty(2, slots, most, hidden, dtype=dtype, device=device)
            self._added_rows = torch.empty(slots, room, hidden, dtype=dtype, device=device)
            self._tables = torch.empty(slots, vocabulary + room, dtype=torch.int32, device=device)
            self._ids = [torch.empty(slots, n, dtype=torch.int64, device=device) for n in (most, most, room)]

    def put(self, slot: int, ends: EndRows | None) -> None:
        """Bring what an adapter replaces into a slot."""
        if ends is None:
            self._held[slot] = None
            return
        table = rows = head_ids = head_rows = added_ids = added_rows = None
        if ends.embedding is not None:
            if self._tables is None:
                table = torch.empty(self._vocabulary + self.room, dtype=torch.int32, device=self._device)
            else:
                table = self._tables[slot]
            ids, rows = self._moved(ends.embedding, slot, 0, self._rows)
            table.fill_(-1)
            table.index_copy_(0, ids, torch.arange(len(ids), dtype=torch.int32, device=self._device))
        if ends.head is not None:
            head_ids, head_rows = self._moved(ends.head, slot, 1, self._head_rows)
        if ends.added is not None:
            added_ids, added_rows = self._moved(ends.added, slot, 2, self._added_rows)
        self._held[slot] = _Held(table, rows, head_ids, head_rows, added_ids, added_rows, ends.tokens)

    def _moved(self, kept: ReplacedRows, slot: int, part: int, all_rows: Tensor | None) -> tuple[Tensor, Tensor]:
        if self._ids is None or all_rows is None:
            return kept.ids, kept.values
        count = len(kept.ids)
        ids, rows = self._ids[part][slot, :count], all_rows[slot, :count]
        ids.copy_(kept.ids, non_blocking=True)
        rows.copy_(kept.values, non_blocking=True)
        return ids, rows

    def begin(self, slots: np.ndarray) -> None:
        self._groups, self._head_groups = self._grouped(slots), []

    def begin_head(self, slots: np.ndarray) -> None:
        self._head_groups = self._grouped(slots)

    def clear(self) -> None:
        """The coming step is captured: it replaces nothing."""
        self._groups, self._head_groups = [], []

    def _grouped(self, slots: np.ndarray) -> list[tuple[_Held, Tensor]]:
        if not any(self._held):
            return []
        found = []
        for slot in np.unique(slots[slots >= 0]).tolist():
            held = self._held[slot]
            if held is not None:
                found.append((held, torch.from_numpy(np.flatnonzero(slots == slot)).to(self._device)))
        return found

    def known(self, token_ids: Tensor) -> Tensor:
        """Ids that the model's own embedding has, in place of those behind it."""
        return token_ids.clamp(max=self._vocabulary - 1) if self.room and self._groups else token_ids

    def replace_embedding(self, token_ids: Tensor, stream: Tensor, *, added: bool = False) -> None:
        """Write over the initial residual stream of tokens whose rows are replaced; `added`: only of those behind the
        vocabulary."""
        if added and not self.room:
            return
        for held, tokens in self._groups:
            if held.table is None or held.rows is None:
                continue
            ids = token_ids[tokens]
            at = held.table[ids]
            replaced = held.rows[at.clamp(min=0)].to(stream.dtype)
            chosen = (at >= 0) & (ids >= self._vocabulary) if added else at >= 0
            stream[tokens] = torch.where(chosen.unsqueeze(1), replaced, stream[tokens])

    def replace_logits(self, x: Tensor, y: Tensor) -> None:
        """Write over logits `y`, before what a family does to them, whose rows of the head are replaced. `x`: what the
        head read."""
        for held, tokens in self._head_groups:
            if held.head_ids is None or held.head_rows is None:
                continue
            y[tokens.unsqueeze(1), held.head_ids] = self._products(x[tokens], held.head_rows).to(y.dtype)

    def _products(self, x: Tensor, rows: Tensor) -> Tensor:
        read, by = x.to(rows.dtype), rows.t()
        pieces = torch.split(read, 1) if self._one_by_one else (read,)
        return torch.cat([piece @ by for piece in pieces])

    def bound_logits(self, x: Tensor, y: Tensor, shaped: Callable[[Tensor], Tensor]) -> Tensor:
        """Take from all logits `y`, at last, those of tokens that an adapter does not have, and put those of its own
        behind them, as `shaped` gives these what a family does to logits."""
        wide = y
        if any(held.added_ids is not None for held, _ in self._head_groups):
            wide = y.new_full((len(y), y.shape[1] + self.room), float("-inf"))
            wide[:, : y.shape[1]] = y
            for held, tokens in self._head_groups:
                if held.added_ids is not None and held.added_rows is not None:
                    logits = shaped(self._products(x[tokens], held.added_rows).float())
                    wide[tokens.unsqueeze(1), held.added_ids] = logits.to(wide.dtype)
            y = wide
        for held, tokens in self._head_groups:
            if held.tokens is not None and held.tokens < y.shape[1]:
                y[tokens, held.tokens :] = float("-inf")
        return y
