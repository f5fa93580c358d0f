"""Splits what a model writes into its thought and its answer, token by token.

Marks that are tokens of the vocabulary are recognised by their ids, so that text which merely spells them is no mark;
others are found in the text. Invariants: what is split off does not depend on how the tokens arrived, nothing is shown
that later proves to be a mark, and of the white space around the thought nothing is shown. A token that belongs to the
thought or to its marks counts as a reasoning token.
"""

from __future__ import annotations

from typing import Literal

from penstock.text.text_model import TextModel
from penstock.text.thought_styles import ThoughtStyle

State = Literal["before", "thinking", "answer"]
"""`before`: the answer may begin with a thought."""
_TAIL = 48
"""Tokens at the end of a prompt in which marks are looked for."""


def prompt_state(style: ThoughtStyle, text: TextModel, prompt: list[int]) -> State:
    """Where a prompt leaves the model: templates may open the thought, or close it at once."""
    tail = text.decode(prompt[-_TAIL:], skip_special=False).rstrip()
    if style.title and tail.endswith(tuple(f"{mark}{style.title}" for mark in style.begin)):
        return "thinking"
    if tail.endswith(style.begin):
        return "thinking"
    if style.answer_begin:
        tail = tail.removesuffix(style.answer_begin).rstrip()
    if tail.endswith(style.end):
        return "answer"
    return "thinking" if style.begun else "before"


def continued_state(style: ThoughtStyle, continued: str, otherwise: State) -> State:
    """Where the beginning of an answer that is in the prompt leaves the model."""
    begun = max(continued.rfind(mark) for mark in style.begin)
    ended = max(continued.rfind(mark) for mark in style.end)
    if begun < 0 and ended < 0:
        return "answer" if continued.strip() else otherwise
    return "thinking" if begun > ended else "answer"


class ThoughtSplitter:
    """For one answer. Marks with ids are handed to `mark`, everything else to `push`; both give back what may be shown
    of the thought and of the answer."""

    __slots__ = (
        *("_answer_begin", "_answer_end", "_begins", "_buffer", "_counted", "_ends", "_leading", "_space"),
        *("_header", "_said", "_spoken", "_state", "_style", "_title", "_wrapped", "marks", "reasoning_tokens"),
    )

    def __init__(self, style: ThoughtStyle, text: TextModel, state: State = "before") -> None:
        known = {spelling: text.added_id(spelling) for spelling in (*style.begin, *style.end)}
        self.marks = {id: spelling in style.begin for spelling, id in known.items() if id is not None}
        """Marks by their ids: whether they begin a thought."""
        self._begins = tuple(spelling for spelling in style.begin if known[spelling] is None)
        self._ends = tuple(spelling for spelling in style.end if known[spelling] is None)
        self._style = style
        self._spoken = text.decode(text.encode(style.header, add_special_tokens=False)) if style.header else ""
        """What is seen of the header between two messages; empty: the answer is one."""
        self._header = self._spoken
        """The same while it may still come."""
        self._said = False
        """Whether there was a message of the answer before, so that a new one begins a paragraph."""
        self._answer_begin, self._answer_end = style.answer_begin, style.answer_end
        self._title = "" if state == "thinking" else style.title
        """What is still to be taken away where the thought begins."""
        self._wrapped = state == "answer"
        """Whether the mark before the answer has come, as it may have in the prompt: then the one behind it counts."""
        self._state: State = state
        self._buffer = ""
        """Text that may turn out to be a mark, or white space that may end the thought."""
        self._space = False
        """Whether the thought has shown anything yet, so that white space counts."""
        self._leading = False
        """Whether white space before the answer is being dropped."""
        self._counted = 0
        """Tokens before the thought has begun."""
        self.reasoning_tokens = 0

    @property
    def thinking(self) -> bool:
        return self._state == "thinking"

    @property
    def done(self) -> bool:
        """Whether all that follows is plain text of the answer."""
        plain = not self._spoken and not self._answer_begin and not self._answer_end
        return self._state == "answer" and not self._leading and not self._buffer and plain

    @property
    def answering(self) -> bool:
        return self._state == "answer"

    @property
    def may_answer(self) -> bool:
        """Whether the last token may belong to the answer."""
        return self._state != "thinking"

    @property
    def dropped(self) -> bool:
        """Whether all since the last text of the answer was no part of it: a thought, marks, white space."""
        return self._state == "thinking" or (self._leading and not self._buffer.strip())

    @property
    def pending(self) -> int:
        """Characters of the answer, as far as is known, that are held back."""
        if self._state == "thinking":
            return 0
        return len(self._buffer.lstrip() if self._leading else self._buffer)

    def expects(self, id: int) -> bool:
        """Whether a token is a mark here. Behind a thought, only those between messages are."""
        return id in self.marks and (self._state != "answer" or bool(self._spoken))

    def mark(self, id: int, raw: str) -> tuple[str, str]:
        """A mark, behind `raw`, which completes what came before."""
        shown, answer = self._read(raw) if raw else ("", "")
        if self._state == "answer":
            return shown, answer + self._next_message(thought=self.marks[id])
        if self._state == "before":
            self._think()
        self._count()
        if self._state == "thinking" and not self.marks[id]:
            shown += self._rest()
            self._end()
        return shown, answer

    def push(self, raw: str) -> tuple[str, str]:
        """The text of a token that is no mark."""
        self._count()
        return self._read(raw) if raw else ("", "")

    def flush(self, raw: str = "") -> tuple[str, str]:
        """What is held back, when no more follows. `raw` completes what came before: it is of no further token."""
        shown, answer = self._read(raw) if raw else ("", "")
        if self._state == "thinking":
            # The half of a mark that the limit of tokens cut; one character, or words, may be the thought's own.
            halves = [_overlap(self._buffer, end) for end in self._ends if not end[0].isalnum()]
            if (half := max(halves, default=0)) > 1:
                self._buffer = self._buffer[:-half]
            return shown + self._rest(), answer
        rest, self._buffer = self._buffer, ""
        return shown, answer + (rest.lstrip() if self._leading else rest)

    def _next_message(self, *, thought: bool) -> str:
        """What is held back of a message of the answer, behind which another one may begin, or a thought."""
        rest = self._buffer.rstrip()
        if self._leading and (rest := rest.lstrip()) and self._said:
            rest = f"\n\n{rest}"
        self._said = self._said or not self._leading or bool(rest)
        self._end()
        self._header, self._answer_begin = self._spoken, self._style.answer_begin
        self._answer_end = self._style.answer_end
        if thought:
            self._state, self._space = "thinking", False
            self._count()
        return rest

    def _rest(self) -> str:
        """What is held back of a thought that is over."""
        rest, self._buffer = self._buffer.rstrip(), ""
        rest = self._untitled(rest)
        return rest if self._space else rest.lstrip()

    def _untitled(self, text: str) -> str:
        """The beginning of a thought without the title that the model writes there, a word by itself."""
        title, self._title = self._title, ""
        if not title:
            return text
        first, space, rest = text.lstrip().partition(title)
        return rest.lstrip() if not first and space and (not rest or rest[0].isspace()) else text

    def _count(self) -> None:
        if self._state == "thinking":
            self.reasoning_tokens += 1
        elif self._state == "before":
            self._counted += 1

    def _think(self) -> None:
        self.reasoning_tokens += self._counted
        self._counted, self._buffer, self._state = 0, "", "thinking"

    def _end(self) -> None:
        self._buffer, self._state, self._leading = "", "answer", True

    def _read(self, raw: str) -> tuple[str, str]:
        self._buffer += raw
        shown = ""
        if self._state == "before" and not self._begin():
            return "", ""
        if self._state == "thinking":
            shown, over = self._thought()
            if not over:
                return shown, ""
        return shown, self._answer()

    def _begin(self) -> bool:
        """Whether it is clear what the answer begins with."""
        rest = self._buffer.lstrip()
        if not rest:
            return False
        for mark in self._begins:
            if rest.startswith(mark):
                self._think()
                self._buffer = rest[len(mark) :]
                return True
        if any(mark.startswith(rest) for mark in self._begins):
            return False
        self._state = "answer"
        return True

    def _thought(self) -> tuple[str, bool]:
        """What may be shown of the thought, and whether it is over."""
        text = self._buffer if self._space else self._buffer.lstrip()
        if self._title and self._title.startswith(text):
            return "", False
        text = self._untitled(text)
        found = min(((at, mark) for mark in self._ends if (at := text.find(mark)) >= 0), default=None)
        if found is not None:
            at, mark = found
            self._end()
            self._buffer = text[at + len(mark) :]
            return text[:at].rstrip(), True
        keep = max((_overlap(text, mark) for mark in self._ends), default=0)
        shown = text[: len(text) - keep].rstrip()
        self._buffer = text[len(shown) :]
        self._space = self._space or bool(shown)
        return shown, False

    def _answer(self) -> str:
        """What may be shown of the answer, without the marks around it."""
        if (self._header and not self._header_read()) or (self._answer_begin and not self._answer_begun()):
            return ""
        text = self._buffer.lstrip() if self._leading else self._buffer
        if text and self._leading and self._said:
            text, self._said = f"\n\n{text}", False
        self._leading = self._leading and not text
        if not self._answer_end:
            self._buffer = ""
            return text
        at = text.find(self._answer_end)
        if at >= 0:  # what else may follow, such as a call, is part of the answer too
            behind = text[at + len(self._answer_end) :].lstrip()
            self._answer_end, self._leading, self._buffer = "", not behind, ""
            return text[:at].rstrip() + behind
        shown = text[: len(text) - _overlap(text, self._answer_end)].rstrip()
        self._buffer = text[len(shown) :]
        return shown

    def _header_read(self) -> bool:
        """Whether it is clear if the thought has a header behind it."""
        rest = self._buffer.lstrip()
        if self._leading and self._header.startswith(rest) and rest != self._header:
            return False
        if self._leading and rest.startswith(self._header):
            self._buffer = rest[len(self._header) :]
        self._header = ""
        return True

    def _answer_begun(self) -> bool:
        """Whether it is clear if the answer has a mark before it, which is taken away with the white space around."""
        rest = self._buffer.lstrip()
        if rest.startswith(self._answer_begin):
            self._buffer = rest[len(self._answer_begin) :]
            self._leading = self._wrapped = True
        elif self._answer_begin.startswith(rest):
            return False
        self._answer_begin = ""
        if not self._wrapped:
            self._answer_end = ""
        return True


def _overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
