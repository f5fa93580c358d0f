"""Shows an answer on a terminal while it is generated, as formatted Markdown.

Paragraphs, lists and code blocks that are complete are printed for good, so that a long answer scrolls like any other
text; only the block at the end is drawn again with every piece.
"""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, ConsoleRenderable
from rich.live import Live
from rich.markdown import Markdown

from penstock.cli.terminal import harmless

FENCES = ("```", "~~~")
PER_SECOND = 12


class MarkdownStream:
    """A context: what was written is complete on the screen when it is left, whatever the reason."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rest = ""
        self._printed = False
        self._live = Live(console=console, refresh_per_second=PER_SECOND, transient=True, get_renderable=self._shown)

    def __enter__(self) -> MarkdownStream:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        last, self._rest = self._rest, ""
        self._live.stop()
        self._print(last)

    def write(self, piece: str) -> None:
        self._rest += piece
        if "\n" in piece:
            done = complete(self._rest)
            if done:
                block, self._rest = self._rest[:done], self._rest[done:]
                self._print(block)

    def _print(self, block: str) -> None:
        if block.strip():
            if self._printed:
                self._console.print()
            self._console.print(_rendered(block.strip("\n")))
            self._printed = True

    def _shown(self) -> ConsoleRenderable:
        return _rendered(self._rest)


def complete(text: str) -> int:
    """Where the last complete block ends: after the last empty line that is not inside a code block."""
    end = at = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        at += len(line)
        mark = line.strip()[:3]
        if fence:
            if mark == fence:
                fence = ""
        elif mark in FENCES:
            fence = mark
        elif not line.strip() and line.endswith("\n"):
            end = at
    return end


def _rendered(text: str) -> ConsoleRenderable:
    return harmless(Markdown(text, code_theme="ansi_dark", hyperlinks=False))
