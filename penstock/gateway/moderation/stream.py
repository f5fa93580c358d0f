"""Streams that moderation models check before clients see them, while the engine goes on.

The pieces of a choice are held back until they fill a window of text, or the choice ends; then the window is checked,
together with the end of what was shown before it. Invariant: no piece is handed out whose text has not passed, and
after one that did not pass nothing follows but the end of the choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.choice import CONTENT_FILTER, Piece

Check = Callable[[str], Awaitable[bool]]
"""Whether a text may be shown."""


@dataclass(slots=True)
class _HeldText:
    """What is held back of one choice."""

    pieces: list[Piece] = field(default_factory=list)
    text: str = ""
    before: str = ""
    """The end of what has been shown."""
    cut: bool = False

    def add(self, piece: Piece) -> None:
        if not self.cut:
            self.pieces.append(piece)
            self.text += (
                piece.reasoning + piece.text + "".join((call.name or "") + call.arguments for call in piece.calls or ())
            )

    def due(self, window: int) -> bool:
        return bool(self.pieces) and (len(self.text) >= window or self.pieces[-1].finish_reason is not None)


class ModeratedStream:
    """Stands between a generation and its reader."""

    def __init__(self, generation: Generation, check: Check, window: int) -> None:
        self._generation = generation
        self._check = check
        self._window = window
        self._held = [_HeldText() for _ in generation.choices]
        self._checking: asyncio.Task[list[Piece]] | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is held back."""
        return self._checking is None and not any(held.pieces for held in self._held)

    async def next(self, within: float | None = None) -> list[Piece]:
        """New pieces that have passed; empty when `within` seconds go by without any."""
        until = None if within is None else monotonic() + within
        while True:
            left = None if until is None else max(until - monotonic(), 0.0)
            if self._checking is None:
                due = [held for held in self._held if held.due(self._window)]
                if due:
                    self._checking = asyncio.create_task(self._check_all(due), name="moderation of an answer")
                elif self._generation.done:
                    return []
                else:
                    for piece in await self._generation.next(left):
                        self._held[piece.index].add(piece)
                    if not left and left is not None and not any(held.due(self._window) for held in self._held):
                        return []
                    continue
            done, _ = await asyncio.wait((self._checking,), timeout=left)
            if not done:
                return []
            pieces, self._checking = self._checking.result(), None
            if pieces:
                return pieces

    async def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            with suppress(asyncio.CancelledError):
                await self._checking

    async def _check_all(self, due: list[_HeldText]) -> list[Piece]:
        """The pieces of these choices, or their ends."""
        return [piece for pieces in await asyncio.gather(*map(self._one, due)) for piece in pieces]

    async def _one(self, held: _HeldText) -> list[Piece]:
        harmless = not held.text or await self._check(held.before + held.text)
        pieces, held.pieces = held.pieces, []
        held.before, held.text = (held.before + held.text)[-self._window :], ""
        if harmless:
            return pieces
        held.cut = True
        index = pieces[0].index
        self._generation.cut(index)
        return [Piece(index, finish_reason=CONTENT_FILTER)]
