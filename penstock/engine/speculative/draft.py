"""Draft tokens from a smaller model.

The draft model has a KV cache of its own, but no block tables of its own: block `b` of both caches belongs to the same
tokens of the same sequence, so preemption, prefix sharing and freeing need no second bookkeeping. What it has not
computed yet (a prompt, tokens generated while it was not asked) it computes when it is next asked, at most `budget`
tokens at a time. A rejected draft token is simply overwritten. Recurrent layers of a draft model leave a state behind
every token that it feeds back, in slots of the sequence's row; it goes on from the one behind the last accepted token.
Their states are not shared between sequences: behind a cached prefix the draft model reads the prompt from its start.

It samples with the noise that the target will sample with (same seed, same position), so where both models agree on the
distribution they agree on the token too, at any temperature.

It does not know tokens that adapters have behind the vocabulary of the model: a sequence with such a token gets no
drafts from there on, and no draft is one.
"""

from __future__ import annotations

import time

from penstock.engine.batch import Batch, Chunk
from penstock.engine.runner.rows import Flag
from penstock.engine.runner.runner import Runner
from penstock.engine.runner.step import PendingStep
from penstock.engine.scheduler import Scheduler
from penstock.engine.sequence import Sequence
from penstock.engine.speculative.gain import Acceptance, StepCosts

FOLLOWED = int(Flag.RANDOM | Flag.FILTER | Flag.BIAS | Flag.WATERMARK)
"""The sampling parameters that a draft follows; penalties and minimum lengths are left to the target."""
_IN_FLIGHT = 2
"""Draft steps launched but not awaited: as many as the runner's staging buffers allow."""


class _State:
    """What is known of one sequence."""

    __slots__ = ("acceptance", "base", "epoch", "read", "slots")

    def __init__(self, overall: Acceptance) -> None:
        self.acceptance = Acceptance(overall, decay=0.9)
        self.epoch = -1
        self.read = 0
        """Leading tokens that are in the draft model's cache."""
        self.base = 0
        self.slots: list[int] = []
        """With recurrent layers: of the states behind the first `base` tokens, and behind each draft token since."""

    def settle(self, row: list[int]) -> None:
        """The state behind the `read`-th token is known to be right, the others are not needed. `row`: all slots of
        the sequence's row."""
        index = self.read - self.base
        if self.read and 0 <= index < len(self.slots):
            self.slots = [self.slots[index]]
        else:
            self.read, self.slots = 0, row[:1]
        self.base = self.read


class DraftProposer:
    """See `Proposer`. `runner` is the draft model's; it uses the rows and blocks that `scheduler` gave out."""

    first = 0
    """The first token that it computes."""

    def __init__(self, runner: Runner, scheduler: Scheduler, *, window: int, budget: int, row_states: int = 0) -> None:
        """`row_states`: with recurrent layers, the slots of states that each row has."""
        self.runner = runner
        self.scheduler = scheduler
        self.window = window
        self.budget = budget
        self.row_states = row_states
        # A chunk of tokens that stand alone would need a slot behind each of them.
        self.single_tokens = runner.executor.prefers_single_tokens and not row_states
        self._overall = Acceptance(0.7, decay=0.995, weight=8.0)
        self._costs = StepCosts()
        self._states: dict[Sequence, _State] = {}
        self._vocabulary = runner.rows.vocab_size
        self._known: dict[Sequence, int] = {}
        """Of sequences whose adapter may have tokens of its own: leading tokens that the draft model knows; -1: one of
        the others it does not."""
        self._contents: list[bytes | None] = [None] * runner.kv.num_blocks
        """By block: the name of the prefix whose last block it holds in the draft's cache, if it is complete."""

    def outlook(self, seq: Sequence) -> tuple[float, int]:
        if not self._knows(seq):
            return 0.0, 0
        state = self._states.get(seq)
        chance = (self._overall if state is None else state.acceptance).chance
        return chance, max(self.window - seq.length - 1, 0)

    def seconds(self, sequences: int) -> float:
        return self._costs.estimate(sequences) or 0.0

    def propose(self, depths: dict[Sequence, int]) -> dict[Sequence, list[int]]:
        room = {seq: self.scheduler.reserve(seq, depth) for seq, depth in depths.items() if self._knows(seq)}
        wanted = self._read_up({seq: count for seq, count in room.items() if count > 0})
        if not wanted:
            return {}
        begin = time.perf_counter()
        try:
            drafts = self._draw(wanted)
        finally:
            for seq in wanted:
                if seq.watermark is not None:
                    seq.watermark.drafted = ()
        deepest = max(wanted.values())
        self._costs.observe(len(wanted), (time.perf_counter() - begin) / deepest)
        return drafts

    def learn(self, seq: Sequence, drafts: tuple[int, ...], tokens: list[int]) -> None:
        state = self._states.get(seq)
        if state is None or not drafts:
            return
        accepted = len(tokens) - 1
        tried = min(accepted + 1, len(drafts))
        state.acceptance.observe(accepted, tried)
        self._overall.observe(accepted, tried)
        # The last draft token was never fed back; the other accepted ones have been computed.
        state.read = len(seq.tokens) - len(tokens) + min(accepted, len(drafts) - 1)
        if self.row_states and seq.row >= 0:
            state.settle(self._row(seq))
        self._note_contents(seq, state)

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq, None)
        self._known.pop(seq, None)

    def _knows(self, seq: Sequence) -> bool:
        """Whether the draft model has all tokens of a sequence, as far as they are there."""
        if seq.adapter is None:
            return True
        if seq.adapter.rows is None:  # it has no such tokens, but a bias may name one
            return max(seq.params.logit_bias, default=0) < self._vocabulary
        known = self._known.get(seq)
        if known is None:
            known = 0 if max(seq.params.logit_bias, default=0) < self._vocabulary else -1
        if known >= 0:
            new = seq.tokens[known:]
            known = known + len(new) if max(new, default=0) < self._vocabulary else -1
        self._known[seq] = known
        return known >= 0

    def forget_caches(self) -> None:
        self._contents = [None] * len(self._contents)

    def _read_up(self, wanted: dict[Sequence, int]) -> dict[Sequence, int]:
        """Compute what is new, except a sequence's last few tokens; sequences that lack more get no draft yet."""
        chunks: list[Chunk] = []
        ready: dict[Sequence, int] = {}
        left = self.budget
        for seq, count in wanted.items():
            state = self._state(seq)
            behind = len(seq.tokens) - 1 - state.read
            if behind <= count:
                ready[seq] = count  # short enough to be computed together with the last token
                continue
            length = min(behind, left)
            if length > 1:  # a single token would count as a decode
                chunks.append(self._chunk(seq, state, length, samples=False))
                left -= length
            if length == behind:
                ready[seq] = count
        if chunks:
            self.runner.run(Batch.of(chunks)).wait()
        return ready

    def _draw(self, wanted: dict[Sequence, int]) -> dict[Sequence, list[int]]:
        drafts: dict[Sequence, list[int]] = {seq: [] for seq in wanted}
        flying: list[PendingStep] = []
        in_flight = _IN_FLIGHT
        for seq in wanted:
            if seq.watermark is not None:
                # Its noise depends on the tokens before it, drafts too: each is awaited before the next is drawn.
                seq.watermark.drafted = drafts[seq]
                in_flight = 1
        further = {seq: count - 1 for seq, count in wanted.items() if count > 1}

        def collect() -> None:
            for seq, token in flying.pop(0).last_tokens():
                drafts[seq].append(token)

        for depth in range(max(wanted.values())):
            chunks = []
            for seq, count in wanted.items():
                if depth < count:
                    state = self._states[seq]
                    chunks.append(self._chunk(seq, state, len(seq.tokens) + depth - state.read, samples=True))
            if len(flying) == in_flight:
                collect()
            flying.append(self.runner.run(Batch.of(chunks)))
            if depth == 0 and further and in_flight > 1 and (ahead := self.runner.executor.draw_ahead(further)):
                collect()
                for seq, tokens in ahead.wait():
                    drafts[seq] += tokens
                    self._overwrite(seq, len(seq.tokens), len(seq.tokens) + len(tokens))
                break
        while flying:
            collect()
        for seq in wanted:
            self._states[seq].read = len(seq.tokens)  # draft tokens count once they are accepted
        return drafts

    def _row(self, seq: Sequence) -> list[int]:
        """The slots of states that its row has; slot 0 is nobody's."""
        first = 1 + seq.row * self.row_states
        return list(range(first, first + self.row_states))

    def _chunk(self, seq: Sequence, state: _State, length: int, *, samples: bool) -> Chunk:
        first, end = state.read, state.read + length
        # Tokens beyond the last one are computed each on its own, as in verification: CUDA graphs hold such steps.
        drafts = tuple(seq.tokens[first + 1 : end]) if samples and self.single_tokens else ()
        chunk = Chunk(seq, first, length, samples, drafts)
        if self.row_states:
            chunk.read, chunk.writes = self._next_state(seq, state, first, end)
        self._overwrite(seq, first, end)
        state.read = end
        return chunk

    def _next_state(self, seq: Sequence, state: _State, first: int, end: int) -> tuple[int, tuple[int, ...]]:
        """The slot of the state before token `first`, and that of the one behind the chunk. Known tokens are followed
        in place; what a draft token may have to give back stays."""
        if end <= len(seq.tokens):
            state.settle(self._row(seq))
            state.base = end
            return (state.slots[0] if first else 0), (state.slots[0],)
        free = next(slot for slot in self._row(seq) if slot not in state.slots)
        state.slots.append(free)
        return state.slots[-2], (free,)

    def _overwrite(self, seq: Sequence, first: int, end: int) -> None:
        """The blocks of these tokens no longer hold what they held."""
        size = self.scheduler.allocator.block_size
        for index in range(first // size, (end - 1) // size + 1):
            self._contents[seq.base + seq.blocks[index]] = None

    def _state(self, seq: Sequence) -> _State:
        state = self._states.get(seq)
        if state is None:
            state = self._states[seq] = _State(self._overall)
        if state.epoch != seq.epoch:
            state.epoch = seq.epoch
            state.read = 0 if self.row_states else max(self._known_prefix(seq), self.first)
            state.slots = []
        return state

    def _known_prefix(self, seq: Sequence) -> int:
        """Leading tokens of a sequence that just (re)started that the draft model has already computed."""
        known = 0
        for block, name in zip(seq.blocks, seq.block_names, strict=False):
            if self._contents[seq.base + block] != name:
                break
            known += self.scheduler.allocator.block_size
        return min(known, len(seq.tokens) - 1)

    def _note_contents(self, seq: Sequence, state: _State) -> None:
        # In a pipeline it may have been preempted while its step was under way: then it has no blocks.
        full = min(state.read // self.scheduler.allocator.block_size, len(seq.block_names), len(seq.blocks))
        for index in range(full - 1, -1, -1):
            block = seq.base + seq.blocks[index]
            if self._contents[block] == seq.block_names[index]:
                break
            self._contents[block] = seq.block_names[index]
