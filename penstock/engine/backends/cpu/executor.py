"""The executor of the CPU backend: steps run natively from a recording, from tokens to tokens where sampling needs only
a temperature."""

from __future__ import annotations

import torch

from penstock.engine.backends.cpu.ops import CpuOps
from penstock.engine.backends.cpu.recorded_step import RecordedStep, RowArrays, record
from penstock.engine.batch import Batch
from penstock.engine.models.decoder import Decoder
from penstock.engine.runner.eager import EagerExecutor
from penstock.engine.runner.inputs import Packed, decode_entries, sampling_chunks, states_of
from penstock.engine.runner.resources import RunnerResources
from penstock.engine.runner.rows import DRAWN, FLOATS, Flag, Rows
from penstock.engine.runner.step import PendingStep


class RecordedExecutor(EagerExecutor):
    """Runs recorded steps; what could not be recorded, or is too large, runs eagerly."""

    def __init__(self, resources: RunnerResources, ops: CpuOps) -> None:
        super().__init__(resources)
        self._ops = ops
        self._max_verified = resources.max_verified
        self.plain: RecordedStep | None = None
        self.adapted: RecordedStep | None = None
        """For steps in which some sequence uses an adapter."""
        self.further: RecordedStep | None = None
        """For steps in which some adapter touches embedding, head or other linears that few do; recorded with the first
        of them."""
        self._further_size = 0
        """Tokens of the largest step, until that was tried."""

    @property
    def recorded(self) -> RecordedStep | None:
        return self.plain

    def prepare(self, token_budget: int) -> None:
        self.plain = self._record(self._decoder, token_budget)
        if self._adapters is not None and self.plain is not None:
            self.adapted = self._record(self._adapters.decoder, token_budget)
            self._further_size = token_budget

    def run(self, batch: Batch) -> PendingStep:
        decoder, recorded = self._decoder, self.plain
        adapters = self._adapters
        if adapters is not None and (adapted := adapters.begin(batch)) is not None:
            decoder = adapted
            recorded = None if adapters.by_host(batch) or adapters.alters(batch) else self._recorded(adapted)
        if recorded is not None and batch.plain and recorded.has_head:
            # Nearly every step: natively from tokens to tokens, unless a row needs more than a draw.
            count = len(batch.chunks)
            if recorded.fits(count, count, count):
                if recorded is self.further and self._adapters is not None:
                    self._adapters.begin_head(self._adapters.slots)
                self._rows.update(batch)
                if (states := states_of(batch)) is not None:
                    recorded.load_states(states)
                if not recorded.load_decodes(decode_entries(batch.chunks)) & ~Flag.RANDOM:
                    return PendingStep(batch, self._rows, batch.chunks, recorded.draw())
        return self._run_packed(batch, decoder, recorded)

    def _recorded(self, adapted: Decoder) -> RecordedStep | None:
        """The recording of a decoder with adapters, if it could be recorded."""
        if self._adapters is None or adapted is self._adapters.decoder:
            return self.adapted
        if self._further_size:
            self.further, self._further_size = self._record(adapted, self._further_size), 0
        return self.further

    @torch.inference_mode()
    def _run_packed(self, batch: Batch, decoder: Decoder, recorded: RecordedStep | None) -> PendingStep:
        packed = self._inputs.pack(batch)
        if recorded is None or not recorded.fits(batch.num_tokens, len(packed.host.rows), len(packed.sample_at)):
            return self._launch(batch, packed, decoder)
        return self._run_recorded(batch, packed, recorded)

    def _run_recorded(self, batch: Batch, packed: Packed, recorded: RecordedStep) -> PendingStep:
        """Any step that fits; rows that need more than a draw are sampled from its logits."""
        step = PendingStep(batch, self._rows)
        at, flags = packed.sample_at, packed.flags
        slots = None
        if recorded is self.further and self._adapters is not None:
            slots = self._adapters.slots[at]
            self._adapters.begin_head(slots)
        recorded.load(packed.host, at, packed.sample_rows, packed.keys() if flags & Flag.RANDOM else None)
        if not len(at):
            recorded.forward()
        elif not recorded.has_head:
            self._sample(step, self._head(slots)(recorded.forward()[at]), self._inputs.sampling_of(batch, packed))
        elif flags & ~DRAWN:
            self._sample(step, recorded.logits(), self._inputs.sampling_of(batch, packed))
        else:
            step.chunks, step.tokens = sampling_chunks(batch), recorded.draw()
        self._score_prompts(batch, recorded.hidden, slots is not None)
        return step

    def _record(self, decoder: Decoder, tokens: int) -> RecordedStep | None:
        samples = min(tokens, max(len(self._rows.block_tables), self._max_verified))
        return record(
            self._ops,
            decoder.forward,
            decoder.head,
            self._kv,
            row_arrays(self._rows),
            block_size=self._inputs.block_size,
            tokens=tokens,
            sequences=tokens if self._inputs.alone else samples,
            samples=samples,
            states=decoder.config.short_conv is not None,
        )


def row_arrays(rows: Rows) -> RowArrays:
    """The rows as a recorded step reads them: the same memory."""
    temperatures = rows.floats.numpy()[:, FLOATS.index("temperature")]
    return RowArrays(rows.host_tables, rows.last_tokens.numpy(), rows.seeds, temperatures, rows.byte_flags)
