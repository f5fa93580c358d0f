"""Guards over the arguments of function calls, where these do not pass as part of the text: the rules for answers hold
for them too."""

from __future__ import annotations

from collections.abc import Callable

from penstock.gateway.generation.choice import TextGuard
from penstock.tools.events import CallArguments, CallEnd, Event


class CallGuard:
    """The guards of one choice: one for each call."""

    __slots__ = ("_guards", "_make")

    def __init__(self, make: Callable[[], TextGuard]) -> None:
        self._make = make
        self._guards: dict[int, TextGuard] = {}

    def push(self, index: int, arguments: str) -> tuple[str, bool]:
        """What may be shown of more arguments of a call, and whether the rest is refused."""
        guard = self._guards.get(index)
        if guard is None:
            guard = self._guards[index] = self._make()
        return guard.push(arguments, final=False)

    def end(self, index: int) -> tuple[str, bool]:
        """What was held back of a call that has ended."""
        guard = self._guards.pop(index, None)
        return ("", False) if guard is None else guard.push("", final=True)

    @property
    def open(self) -> list[int]:
        """The calls that have not ended."""
        return list(self._guards)

    def filtered(self, events: list[Event]) -> tuple[list[Event], bool]:
        """The events that may be shown, and whether the rest is refused."""
        shown: list[Event] = []
        for event in events:
            if not isinstance(event, CallArguments | CallEnd):
                shown.append(event)
                continue
            more = event.text if isinstance(event, CallArguments) else None
            text, refused = self.end(event.index) if more is None else self.push(event.index, more)
            if text:
                shown.append(CallArguments(event.index, text))
            if refused:
                return shown, True
            if more is None:
                shown.append(event)
        return shown, False
