"""The work of one step: which tokens of which sequences. The scheduler makes it, the runner launches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.engine.grammar.interface import PendingMasks
from penstock.engine.kv.host import Transfers
from penstock.engine.sequence import Sequence

if TYPE_CHECKING:
    from penstock.engine.adapters.peft import LoadedAdapter


@dataclass(slots=True)
class Chunk:
    """Consecutive tokens of one sequence to compute in a step."""

    seq: Sequence
    start: int
    length: int
    samples: bool
    """The chunk reaches the end of the sequence, so the step also samples its next token."""
    drafts: tuple[int, ...] = ()
    """Draft tokens after the last real one, part of `length`; the step samples behind each of them too."""
    read: int = 0
    """With recurrent layers: the slot of the state before it; see `kv.states`."""
    writes: tuple[int, ...] = ()
    """The slots of the states behind its last token or, with draft tokens, behind each."""

    @property
    def adapter(self) -> LoadedAdapter | None:
        """What this step applies to it. An adapter that is virtual tokens has done its part when these are computed."""
        seq = self.seq
        return seq.adapter if not seq.virtual or self.start < seq.virtual else None

    @property
    def slot(self) -> int:
        """Of that adapter on the device; -1: there is none."""
        seq = self.seq
        return seq.slot if not seq.virtual or self.start < seq.virtual else -1

    @property
    def decodes(self) -> bool:
        """Whether only the last real token is computed, with or without draft tokens behind it."""
        return self.length == 1 + len(self.drafts)


@dataclass(slots=True)
class Batch:
    """One step's work; decodes come first. Without chunks it is only copies."""

    chunks: list[Chunk]
    num_decodes: int
    """Tokens that belong to decodes, draft tokens included: each attends on its own."""
    num_tokens: int
    masks: PendingMasks | None = None
    """For its sequences with a grammar; set when the step is launched."""
    transfers: Transfers | None = None
    """Blocks to copy to and from the host before the step."""
    state_transfers: Transfers | None = None
    """The same of states."""
    restores: bool = False
    """Whether blocks are copied back for sequences that have waited for them; they may be in no chunk of it."""
    speculative: bool = False
    """Whether some chunk carries draft tokens."""
    plain: bool = False
    """Whether every chunk is one token without draft tokens, behind which one is sampled."""

    @property
    def fills(self) -> bool:
        """Whether blocks or states are copied back from the host."""
        return any(copies is not None and bool(copies.back) for copies in (self.transfers, self.state_transfers))

    @property
    def prompts(self) -> list[tuple[int, int]]:
        """First position and number of tokens of each chunk of a prompt."""
        if self.num_decodes == self.num_tokens:
            return []
        return [(chunk.start, chunk.length) for chunk in self.chunks if not chunk.decodes]

    @classmethod
    def of(cls, chunks: list[Chunk], transfers: Transfers | None = None) -> Batch:
        """`chunks` in any order."""
        tokens = decodes = samples = drafted = 0
        ordered = True
        for chunk in chunks:
            length, drafts = chunk.length, len(chunk.drafts)
            if length == 1 + drafts:
                ordered = ordered and decodes == tokens
                decodes += length
            tokens += length
            drafted += drafts
            samples += chunk.samples
        if not ordered:
            chunks.sort(key=lambda chunk: not chunk.decodes)
        plain = drafted == 0 and tokens == samples == len(chunks)
        return cls(chunks, decodes, tokens, transfers=transfers, speculative=drafted > 0, plain=plain)
