"""The executor of the CPU backend: steps run natively from a recording, from tokens to tokens where sampling needs only
a temperature."""

from __future__ import annotations

import torch

from penstock.engine.backends.cpu.ops import CpuOps
from penstock.engine.backends.cpu.recorded_step import RecordedStep, RowArrays, record
from penstock.engine.batch import Batch
from penstock.engine.models.decoder import Decoder
from penstock.engine.runner.eager import EagerExecutor
from penstock.engine.runner.inputs import Packed, decode_entries, sampling_chunks
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

    @property
    def recorded(self) -> RecordedStep | None:
        return self.plain

    def prepare(self, token_budget: int) -> None:
        self.plain = self._record(self._decoder, token_budget)
        if self._adapters is not None and self.plain is not None:
            self.adapted = self._record(self._adapters.decoder, token_budget)

    def run(self, batch: Batch) -> PendingStep:
        decoder, recorded = self._decoder, self.plain
        if self._adapters is not None and (adapted := self._adapters.begin(batch)) is not None:
            decoder, recorded = adapted, self.adapted if adapted is self._adapters.decoder else None
        if recorded is not None and batch.plain and recorded.has_head:
            # Nearly every step: natively from tokens to tokens, unless a row needs more than a draw.
            count = len(batch.chunks)
            if recorded.fits(count, count, count):
                self._rows.update(batch)
                if not recorded.load_decodes(decode_entries(batch.chunks)) & ~Flag.RANDOM:
                    return PendingStep(batch, self._rows, batch.chunks, recorded.draw())
        return self._run_packed(batch, decoder, recorded)

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
        recorded.load(packed.host, at, packed.sample_rows, packed.keys() if flags & Flag.RANDOM else None)
        if not len(at):
            recorded.forward()
        elif not recorded.has_head:
            self._sample(step, self._decoder.head(recorded.forward()[at]), self._inputs.sampling_of(batch, packed))
        elif flags & ~DRAWN:
            self._sample(step, recorded.logits(), self._inputs.sampling_of(batch, packed))
        else:
            step.chunks, step.tokens = sampling_chunks(batch), recorded.draw()
        self._score_prompts(batch, recorded.hidden)
        return step

    def _record(self, decoder: Decoder, tokens: int) -> RecordedStep | None:
        samples = min(tokens, max(len(self._rows.block_tables), self._max_verified))
        return record(
            self._ops,
            decoder.forward,
            self._decoder.head,
            self._kv,
            row_arrays(self._rows),
            block_size=self._inputs.block_size,
            tokens=tokens,
            sequences=tokens if self._inputs.alone else samples,
            samples=samples,
        )


def row_arrays(rows: Rows) -> RowArrays:
    """The rows as a recorded step reads them: the same memory."""
    temperatures = rows.floats.numpy()[:, FLOATS.index("temperature")]
    return RowArrays(rows.host_tables, rows.last_tokens.numpy(), rows.seeds, temperatures, rows.byte_flags)
