"""Steps in flight, and how they share what there is to compute.

In a pipeline several steps are in flight, one for each stage. A sequence is in at most one of them that samples, since
the next needs its token; so running sequences take turns, and what there is to compute is divided evenly: a step larger
than the others makes all stages wait for it, one after the other. The chunks of a long prompt follow each other in
flight: a chunk needs the keys and values of those before it, which every stage computes in order.

Elsewhere nobody takes turns: every step may have all sequences.
"""

from __future__ import annotations

from penstock.engine.batch import Batch
from penstock.engine.sequence import Sequence

LEAST_SHARE, LEAST_BESIDE_DECODES = 128, 32
"""Prompt tokens that are not divided further between steps in flight: a smaller step would read the weights for too
little. One that decodes reads them anyway."""


class Turns:
    """Counts what is in flight. `batches`: steps between which sequences take turns; 1: they do not."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.in_flight = 0
        """Steps that were scheduled and have not landed."""
        self.prompt_tokens = 0
        """Of those steps."""
        self._parked: dict[Sequence, int] = {}
        """Rows of sequences that were stopped while a step samples for them in flight: it still needs them."""

    def scheduled(self, batch: Batch) -> None:
        self.in_flight += 1
        self.prompt_tokens += batch.num_tokens - batch.num_decodes

    def landed(self, batch: Batch) -> list[int]:
        """A step is over; the rows that nobody needs any more."""
        self.in_flight -= 1
        self.prompt_tokens -= batch.num_tokens - batch.num_decodes
        if not self._parked:
            return []
        return [self._parked.pop(chunk.seq) for chunk in batch.chunks if chunk.samples and chunk.seq in self._parked]

    def start_over(self) -> list[int]:
        """What was in flight is lost; the rows that it needed."""
        self.in_flight = self.prompt_tokens = 0
        rows = list(self._parked.values())
        self._parked.clear()
        return rows

    def parks(self, seq: Sequence) -> bool:
        """Whether the row of a sequence that is stopped now stays taken until a step in flight has landed."""
        if self.batches == 1 or not seq.pending:
            return False
        self._parked[seq] = seq.row
        return True

    def decodes(self, decoding: int, ready: int) -> int:
        """Most of the `ready` sequences to decode in one step: an equal part of all that decode, those in flight
        included, and of those that are ready one for every step that may still join those in flight."""
        free = max(self.batches - self.in_flight, 1)
        return min(-(-decoding // self.batches), -(-ready // free))

    def prompt_share(self, waiting: int, decodes: int) -> int:
        """Most prompt tokens in a step with so many decodes: an equal part of those that wait or are in flight."""
        least = LEAST_BESIDE_DECODES if decodes else LEAST_SHARE
        return max(least, -(-(self.prompt_tokens + waiting) // self.batches))
