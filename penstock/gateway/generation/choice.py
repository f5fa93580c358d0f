"""Token ids of one choice to text: detokenization, stop strings, logprobs, finish reason.

Invariant: text handed out never contains a stop string or a part of one that later completes, never half a
character, and logprobs are handed out with the text they belong to, so that both are cut at the same place. What a
choice says, how it ends and how many tokens it counts depends on its tokens alone, not on how they arrived: a late
reader finds several merged into one delta, and tokens after the end are neither shown nor counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.engine.request import Delta, TokenLogprob
from penstock.knowledge.citations import Citation, Citer
from penstock.text import StopStrings, TextModel
from penstock.text.thought_splitter import ThoughtSplitter
from penstock.tools.channels import ChannelSplitter
from penstock.tools.events import CallArguments, CallBegin, Event, Text
from penstock.tools.parser import ToolCallParser
from penstock.tools.toolbox import Toolbox

CONTENT_FILTER = "content_filter"
"""`finish_reason` of a choice that a guardrail cut off."""
TIME_LIMIT = "time_limit"
"""`stop_reason` of a choice that used up the time a request may take; its `finish_reason` is `length`."""


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """A generated token, where its text starts in the completion, and its probabilities."""

    id: int
    offset: int
    logprob: TokenLogprob


@dataclass(frozen=True, slots=True)
class SpelledToken:
    """The same for a model whose tokenizer is elsewhere: a token is known by its text."""

    token: str
    offset: int
    logprob: float
    bytes: list[int] | None = None
    top: Sequence[SpelledToken] = ()
    """The likeliest tokens at its place."""


AnyToken = TokenPiece | SpelledToken


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Part of a function call: its beginning, with an id and a name, or more of its arguments."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(slots=True)
class Piece:
    """New output of one choice. The last piece carries `finish_reason`."""

    index: int
    text: str = ""
    tokens: Sequence[AnyToken] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """What ended the choice: a stop string or stop token id of the request, or `TIME_LIMIT`."""
    token_ids: list[int] | None = None
    """All tokens since the last piece, those that are not shown as text included; None unless they are wanted."""
    calls: list[CallPiece] | None = None
    citations: Sequence[Citation] = ()
    reasoning: str = ""
    """Thoughts of the model, which are no part of its answer."""


class TextGuard(Protocol):
    """Filters the text of one choice as it is generated."""

    def push(self, text: str, *, final: bool) -> tuple[str, bool]:
        """Text that may be shown now, and whether the rest is refused."""


class EventGuard(Protocol):
    """Filters the calls of one choice as they are generated."""

    def filtered(self, events: list[Event]) -> tuple[list[Event], bool]:
        """The events that may be shown, and whether the rest is refused."""


class Choice:
    """The text side of one engine request."""

    __slots__ = (
        "_begun",
        "_call_seed",
        "_detokenizer",
        "_eos",
        "_held",
        "_ids",
        "_include_stop",
        "_length",
        "_min_tokens",
        "_parser",
        "_released",
        "_splitter",
        "_stops",
        "_text",
        "_toolbox",
        "call_guard",
        "citer",
        "completion_tokens",
        "decode_s",
        "discard",
        "finished",
        "first_at",
        "guard",
        "index",
        "last_at",
        "logprob",
        "outcome",
        "prefill_s",
        "prompt_logprobs",
        "queue_s",
        "reasoning_tokens",
        "thought_guard",
        "want_logprobs",
    )

    def __init__(
        self,
        index: int,
        text: TextModel,
        *,
        stops: Sequence[str],
        min_tokens: int = 0,
        want_logprobs: bool = False,
        want_ids: bool = False,
        discard: bool = False,
        continuation: bool = False,
        toolbox: Toolbox | None = None,
        call_seed: str = "",
        continued: str = "",
        skip_special: bool = True,
        include_stop: bool = False,
        splitter: ThoughtSplitter | ChannelSplitter | None = None,
        ends: Sequence[int] | None = None,
    ) -> None:
        """`toolbox`: functions that the text may call. `call_seed`: what the ids of calls are derived from, so that
        they are the same when the tokens are read again; empty: they are random. `continuation`: the text continues
        the prompt, so a leading space stays; `continued`: the answer's beginning that is in the prompt already, in
        which a call may have begun. `skip_special`: control tokens are not shown. `include_stop`: what stops the text,
        a string or a token, is part of it. `discard`: the request is only run for its prompt; what it generates is
        neither shown nor counted. `splitter`: tells thoughts from the answer; stop strings, functions and
        log-probabilities belong to the answer alone. `ends`: tokens that end an answer, where they are not the model's
        usual ones."""
        self.index = index
        self.want_logprobs = want_logprobs
        self._text = text
        self._ids: list[int] | None = [] if want_ids else None
        self.discard = discard
        self._eos = tuple(text.eos_token_ids if ends is None else ends)
        self._splitter = splitter
        self.reasoning_tokens = 0
        """Of the completion tokens, those of thoughts."""
        self._toolbox = toolbox
        self._call_seed = call_seed
        self._parser = None if toolbox is None or isinstance(splitter, ChannelSplitter) else toolbox.parser()
        self._begun: list[Event] = []
        if toolbox is not None and self._parser is not None and continued:
            parser = toolbox.parser()
            events = parser.push(continued)
            if parser.inside_call:
                self._parser, self._begun = parser, [event for event in events if not isinstance(event, Text)]
        shown = frozenset[int]() if toolbox is None else toolbox.shown
        self._detokenizer = text.detokenizer(skip_special=skip_special, continuation=continuation, shown=shown)
        self._include_stop = include_stop
        self._stops = StopStrings(stops, include=include_stop) if stops else None
        self._min_tokens = min_tokens
        self._held: deque[TokenPiece] = deque()
        self._length = 0
        self._released = 0
        self.completion_tokens = 0
        self.logprob = 0.0
        """Of all tokens that count, where log-probabilities came with them."""
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.guard: TextGuard | None = None
        self.thought_guard: TextGuard | None = None
        """Filters thoughts by the same rules."""
        self.call_guard: EventGuard | None = None
        """Filters calls that are messages of their own; others are part of the text when `guard` sees it."""
        self.citer: Citer | None = None
        self.finished = False
        self.outcome: str | None = None
        """Why it ended, as logs and metrics have it (clients see `timeout` as `length`)."""
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.queue_s: float | None = None
        self.prefill_s: float | None = None
        self.decode_s: float | None = None
        """How long each phase took, as the engine reports it; None where it does not."""

    def feed(self, delta: Delta) -> Piece | None:
        """Text and logprobs that are safe to show after `delta`; None when there are none."""
        if self.finished:
            return None
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        piece = Piece(self.index)
        tokens = [] if self.discard else delta.tokens
        stopped = delta.finish_reason == "stop" and bool(tokens)
        if stopped and tokens[-1] not in self._eos:
            piece.stop_reason = tokens[-1]
        # Where the text may end inside the delta, its tokens are taken one by one: how many were merged is arbitrary.
        together = self._stops is None and self.guard is None and self._splitter is None
        step = max(len(tokens), 1) if together else 1
        matched: str | None = None
        for at in range(0, max(len(tokens), 1), step):
            part = tokens[at : at + step]
            self.completion_tokens += len(part)
            if delta.logprobs is not None:
                self.logprob += sum(score.logprob for score in delta.logprobs[at : at + len(part)])
            if self._ids is not None:
                self._ids += part
            last = delta.finish_reason is not None and at + step >= len(tokens)
            if last and stopped and not self._include_stop:
                part = part[:-1]  # the stop token ends the text; it is not part of it
            scores = delta.logprobs[at : at + step] if delta.logprobs is not None else ()
            blocked = False
            if self._splitter is not None:
                raw, blocked = self._split(self._splitter, piece, part, scores, final=last)
            else:
                raw = self._detokenize(part, scores)
                if last:
                    raw += self._detokenizer.flush()
            if not blocked:
                text, matched, blocked = self._show(raw, final=last)
                piece.text += text
            if matched is not None or blocked:
                break
        if blocked:
            piece.finish_reason, piece.stop_reason = CONTENT_FILTER, None
        elif matched is not None:
            piece.finish_reason, piece.stop_reason = "stop", matched
        elif delta.finish_reason is not None:
            piece.finish_reason = "stop" if delta.finish_reason == "complete" else delta.finish_reason
            if delta.finish_reason == "timeout":
                piece.finish_reason, piece.stop_reason = "length", TIME_LIMIT
        if self._parser is not None:
            self._read_calls(self._parser, piece)
        elif isinstance(self._splitter, ChannelSplitter):
            self._take_calls(self._splitter, piece)
        if self.citer is not None:
            piece.text, piece.citations = self.citer.push(piece.text, final=piece.finish_reason is not None)
        piece.tokens = self._release(final=piece.finish_reason is not None, cut=matched is not None)
        shows = bool(piece.text or piece.reasoning or piece.tokens or piece.calls)
        if self._ids is not None and (piece.finish_reason is not None or shows):
            piece.token_ids, self._ids = self._ids, []
        if piece.finish_reason is not None:
            self.finished = True
            ended = matched is not None or delta.finish_reason == "complete"
            self.outcome = CONTENT_FILTER if blocked else "stop" if ended else str(delta.finish_reason)
            return piece
        return piece if shows else None

    def _show(self, raw: str, *, final: bool) -> tuple[str, str | None, bool]:
        """The part of `raw` that may be shown, the stop string that matched, and whether a guard refused the rest."""
        self._length += len(raw)
        text, matched, blocked = raw, None, False
        if self._stops is not None and self.completion_tokens >= self._min_tokens:
            text, matched = self._stops.push(raw)
            if matched is None and final:
                text += self._stops.flush()
        self._released += len(text)
        if self.guard is not None:
            text, blocked = self.guard.push(text, final=final or matched is not None)
        return text, matched, blocked

    def _read_calls(self, parser: ToolCallParser, piece: Piece) -> None:
        """Take function calls out of the piece's text."""
        assert self._toolbox is not None
        events = [*self._begun, *parser.push(piece.text)]
        self._begun = []
        if piece.finish_reason is not None:
            events += parser.flush()
            if parser.calls and piece.finish_reason == "stop" and piece.stop_reason is None:
                piece.finish_reason = "tool_calls"
        piece.text = "".join(event.text for event in events if isinstance(event, Text))
        self._report(events, piece)

    def _take_calls(self, splitter: ChannelSplitter, piece: Piece) -> None:
        """Function calls that are messages of their own."""
        if splitter.calls and piece.finish_reason == "stop" and piece.stop_reason is None:
            piece.finish_reason = "tool_calls"
        events = [*self._begun, *splitter.events]
        self._begun = []
        splitter.events.clear()
        if events and self._toolbox is not None:
            self._report(events, piece)

    def _report(self, events: Sequence[Event], piece: Piece) -> None:
        assert self._toolbox is not None
        piece.calls = []
        for event in events:
            if self._toolbox.first_only and isinstance(event, CallBegin | CallArguments) and event.index > 0:
                continue
            if isinstance(event, CallBegin):
                seed = self._call_seed and f"{self._call_seed}.{self.index}.{event.index}"
                piece.calls.append(CallPiece(event.index, self._toolbox.form.new_id(seed), event.name, ""))
            elif isinstance(event, CallArguments):
                piece.calls.append(CallPiece(event.index, None, None, event.text))

    def _split(
        self,
        splitter: ThoughtSplitter | ChannelSplitter,
        piece: Piece,
        tokens: list[int],
        logprobs: Sequence[TokenLogprob],
        *,
        final: bool,
    ) -> tuple[str, bool]:
        """The answer's part of at most one token, and whether a guard refused the thought, whose part goes to the
        piece."""
        thought = answer = ""
        was = splitter.thinking
        for at, token in enumerate(tokens):
            if splitter.expects(token):
                thought, answer = splitter.mark(token, self._detokenizer.flush())
                unseen = False
            else:
                offset = self._length + splitter.pending
                raw = self._detokenizer.push((token,))
                thought, answer = splitter.push(raw)
                unseen = not raw  # a control token, or part of a character
                counts = self.want_logprobs and at < len(logprobs) and splitter.may_answer
                if counts and not (unseen and self._text.is_special(token)):
                    self._held.append(TokenPiece(token, offset, logprobs[at]))
            if splitter.dropped and not unseen:
                while self._held and self._held[-1].offset >= self._length + len(answer):
                    self._held.pop()
        if final:
            more = splitter.flush(self._detokenizer.flush())
            thought, answer = thought + more[0], answer + more[1]
        self.reasoning_tokens = splitter.reasoning_tokens
        if splitter.done:
            self._splitter = None
        blocked = False
        if self.thought_guard is not None and (thought or was):
            over = final or not splitter.thinking
            thought, blocked = self.thought_guard.push(thought, final=over)
            if over and not isinstance(splitter, ChannelSplitter):
                self.thought_guard = None
        piece.reasoning += thought
        if self.call_guard is not None and isinstance(splitter, ChannelSplitter) and not blocked:
            events, blocked = self.call_guard.filtered(splitter.events)
            self._begun += events
            splitter.events.clear()
        return answer, blocked

    def _detokenize(self, tokens: list[int], logprobs: Sequence[TokenLogprob]) -> str:
        if not self.want_logprobs:
            return self._detokenizer.push(tokens)
        raw = ""
        for token, logprob in zip(tokens, logprobs, strict=False):
            offset = self._length + len(raw)
            text = self._detokenizer.push([token])
            self._held.append(TokenPiece(token, offset, logprob))
            raw += text
        return raw

    def _release(self, *, final: bool, cut: bool) -> list[TokenPiece]:
        """Tokens whose text has been shown. At the end: all of them, unless a stop string cut the text."""
        released: list[TokenPiece] = []
        while self._held and (self._held[0].offset < self._released or (final and not cut)):
            released.append(self._held.popleft())
        return released
