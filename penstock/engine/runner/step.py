"""A step that has been launched, and what it sampled once that is on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from penstock.engine.backends.interface import CopyEvent, Ints
from penstock.engine.batch import Batch, Chunk
from penstock.engine.request import TokenLogprob
from penstock.engine.runner.rows import Rows
from penstock.engine.runner.sampler import LogprobTensors
from penstock.engine.sequence import Sequence
from penstock.engine.speculative.verification import count_accepted

Sampled = tuple[Chunk, list[int], list[TokenLogprob] | None]
"""On the host: a chunk, the tokens that a step added behind it (one, and one more for each accepted draft token), and
their log-probabilities where they are wanted."""


@dataclass(slots=True)
class DrawnAhead:
    """Draft tokens that are being drawn one after the other on the device."""

    counts: dict[Sequence, int]
    tokens: Tensor | Ints
    """[steps, sequences]"""
    event: CopyEvent | None

    def wait(self) -> list[tuple[Sequence, list[int]]]:
        """Block until they are on the host."""
        if self.event is not None:
            self.event.synchronize()
        columns = zip(*self.tokens.tolist(), strict=True)
        return [(seq, list(drawn[:count])) for (seq, count), drawn in zip(self.counts.items(), columns, strict=True)]


@dataclass(slots=True)
class PendingStep:
    """A step that has been launched."""

    batch: Batch
    rows: Rows
    chunks: list[Chunk] = field(default_factory=list)
    """The chunk of each sampled token; see `SampleRequest`."""
    tokens: Tensor | Ints | None = None
    logprobs: LogprobTensors | None = None
    event: CopyEvent | None = None
    """Ends the step and the copy of its tokens to the host; None: they are there."""
    began: CopyEvent | None = None
    """Precedes the step on the device; None where steps are not timed there."""
    begun_at: float = 0.0
    """When the host began to launch it; a CPU computes it from then on."""
    launched_at: float = 0.0
    sampling: Callable[[], None] | None = None
    """Samples, once the hidden states are back from the last stage of a pipeline; None: that has been launched."""

    def finish(self) -> None:
        """Have everything launched. Steps are finished in the order they were launched in."""
        if self.sampling is not None:
            self.sampling()
            self.sampling = None

    def took(self, otherwise: float) -> float | None:
        """Seconds that the step took, once it was waited for; `otherwise` is what the host saw of it. None: unknown."""
        if self.began is None:
            return otherwise
        return None if self.event is None else self.began.elapsed_time(self.event) / 1e3

    @property
    def done(self) -> bool:
        """Whether the device is known to be done with it."""
        return self.event is not None and self.event.query()

    def last_tokens(self) -> list[tuple[Sequence, int]]:
        """Block until the step's tokens are on the host; of each sequence the one behind its last token."""
        tokens = self._tokens()
        return list({chunk.seq: token for chunk, token in zip(self.chunks, tokens, strict=True)}.items())

    def _tokens(self) -> list[int]:
        self.finish()
        if self.event is not None:
            self.event.synchronize()
        return [] if self.tokens is None else self.tokens.tolist()

    def wait(self) -> list[Sampled]:
        """Block until the step's tokens are on the host; they come in batch order."""
        tokens = self._tokens()
        if self.batch.plain and self.logprobs is None:
            return [(chunk, [token], None) for chunk, token in zip(self.chunks, tokens, strict=True)]
        logprobs = None
        if self.logprobs is not None:
            logprobs = self.logprobs.to_lists([chunk.seq.params.logprobs for chunk in self.chunks])
        sampled: list[Sampled] = []
        at = 0
        while at < len(tokens):
            chunk = self.chunks[at]
            kept = at + 1 + count_accepted(chunk.drafts, tokens[at:])
            scores = None if logprobs is None else [score for score in logprobs[at:kept] if score is not None]
            sampled.append((chunk, tokens[at:kept], scores or None))
            if chunk.drafts:
                self.rows.count(chunk.seq, tokens[at:kept])
            at += 1 + len(chunk.drafts)
        return sampled
