"""One choice of a remote answer: from the chunks of a server to pieces, with stop strings, guards and citations.

Invariant: as for choices of an engine, text that is handed out contains no stop string nor the beginning of one, and
log-probabilities come with the text that they belong to. Servers apply stop strings themselves; they are looked for
here as well, because servers differ in how many they take and none says which one it found in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from penstock.backends.remote.chunk import CallDelta, ChunkChoice, TokenOdds
from penstock.gateway.generation.call_guard import CallGuard
from penstock.gateway.generation.choice import CONTENT_FILTER, CallPiece, Piece, SpelledToken, TextGuard
from penstock.knowledge.citations import Citer
from penstock.text import StopStrings

_REASONS = frozenset(("stop", "length", "tool_calls", "content_filter"))


class RemoteChoice:
    """See above."""

    __slots__ = (
        *("_begun", "_held", "_length", "_logprobs", "_released", "_stops", "_token_ids", "call_guard", "citer"),
        *("completion_tokens", "cut_here", "finished", "first_at", "guard", "index", "last_at", "logprob", "outcome"),
        *("said", "thought_guard"),
    )

    def __init__(
        self,
        index: int,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        logprobs: bool = False,
        token_ids: bool = False,
    ) -> None:
        """`logprobs`, `token_ids`: whether the client is shown them."""
        self.index = index
        self.finished = False
        self.outcome: str | None = None
        self.completion_tokens = 0
        """An estimate, until the server reports its usage: log-probabilities that came, or else chunks with content."""
        self.logprob = 0.0
        """Of all tokens, where log-probabilities came with them."""
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.guard: TextGuard | None = None
        self.thought_guard: TextGuard | None = None
        self.call_guard: CallGuard | None = None
        self.citer: Citer | None = None
        self.cut_here = False
        """A stop string or a guard ended it, before its server did."""
        self.said: list[str] = []
        """The text, as the server sent it, up to a stop string."""
        self._stops = StopStrings(stops, include=include_stop) if stops else None
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._begun: set[int] = set()
        self._held: deque[SpelledToken] = deque()
        self._length = 0
        self._released = 0

    def read(self, sent: ChunkChoice) -> Piece:
        """What a chunk adds. The last piece of the choice has a finish reason."""
        delta = sent.delta
        raw = (delta.content or "") + (delta.refusal or "")
        final = sent.finish_reason is not None
        calls, refused = self._calls(delta.tool_calls or (), final=final)
        piece = Piece(self.index, calls=calls)
        odds = (None if sent.logprobs is None else sent.logprobs.content) or ()
        self.completion_tokens += tokens_in(sent)
        self.logprob += sum(token.logprob for token in odds)
        if self._logprobs:
            self._hold(odds)
        if self._token_ids and (sent.token_ids or final):
            piece.token_ids = sent.token_ids or []
        self._length += len(raw)
        text, matched = raw, None
        if self._stops is not None:
            text, matched = self._stops.push(raw)
            if matched is None and final:
                text += self._stops.flush()
        self._released += len(text)
        self.said.append(text)
        if sent.finish_reason is not None:
            piece.finish_reason = sent.finish_reason if sent.finish_reason in _REASONS else "stop"
            piece.stop_reason = sent.stop_reason
        if matched is not None:
            piece.finish_reason, piece.stop_reason = "stop", matched
        ends = refused or piece.finish_reason is not None
        piece.reasoning, blocked = self._thoughts(delta.reasoning_content or "", ended=bool(raw or ends))
        if self.guard is not None and not blocked:
            text, blocked = self.guard.push(text, final=ends)
        if blocked:
            piece.calls = None
        if blocked or refused:
            piece.finish_reason, piece.stop_reason = CONTENT_FILTER, None
        if self.citer is not None:
            text, piece.citations = self.citer.push(text, final=piece.finish_reason is not None)
        piece.text = text
        piece.tokens = self._release(final=ends, cut=matched is not None or blocked or refused)
        if piece.finish_reason is not None:
            self.finished, self.outcome = True, piece.finish_reason
            self.cut_here = not final
        return piece

    def end(self) -> str:
        """The text that is still held back, when the choice is cut off."""
        text = "" if self._stops is None else self._stops.flush()
        if self.guard is not None:
            text = self.guard.push(text, final=True)[0]
        if self.citer is not None:
            text = self.citer.push(text, final=True)[0]
        return text

    def _thoughts(self, text: str, *, ended: bool) -> tuple[str, bool]:
        """Thoughts pass the same rules as the answer, which begins where they end."""
        if self.thought_guard is None:
            return text, False
        shown, blocked = self.thought_guard.push(text, final=ended)
        if ended:
            self.thought_guard = None
        return shown, blocked

    def _calls(self, sent: Sequence[CallDelta], *, final: bool) -> tuple[list[CallPiece] | None, bool]:
        """The parts of calls that may be shown, and whether a guard refused the rest."""
        calls: list[CallPiece] = []
        refused = False
        for call in sent:
            if call.index not in self._begun and call.function is not None:
                self._begun.add(call.index)
                calls.append(CallPiece(call.index, call.id or f"call_{call.index}", call.function.name, ""))
            text = "" if call.function is None else call.function.arguments or ""
            if text and self.call_guard is not None:
                text, refused = self.call_guard.push(call.index, text)
            if text:
                calls.append(CallPiece(call.index, None, None, text))
            if refused:
                return calls, True
        if final and self.call_guard is not None:
            for index in self.call_guard.open:
                text, refused = self.call_guard.end(index)
                if text:
                    calls.append(CallPiece(index, None, None, text))
                if refused:
                    return calls, True
        return calls or None, False

    def _hold(self, odds: Sequence[TokenOdds]) -> None:
        offset = self._length
        for token in odds:
            top = [SpelledToken(other.token, offset, other.logprob, other.bytes) for other in token.top_logprobs]
            self._held.append(SpelledToken(token.token, offset, token.logprob, token.bytes, top))
            offset += len(token.token)

    def _release(self, *, final: bool, cut: bool) -> list[SpelledToken]:
        """Tokens whose text has been shown. At the end: all of them, unless the text was cut."""
        released: list[SpelledToken] = []
        while self._held and (self._held[0].offset < self._released or (final and not cut)):
            released.append(self._held.popleft())
        return released


def tokens_in(sent: ChunkChoice) -> int:
    """How many tokens a chunk stands for, as far as it tells."""
    if sent.token_ids:
        return len(sent.token_ids)
    if sent.logprobs is not None and sent.logprobs.content:
        return len(sent.logprobs.content)
    delta = sent.delta
    return bool(delta.content or delta.refusal or delta.reasoning_content or delta.tool_calls)
