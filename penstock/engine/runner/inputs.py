"""Input preparation: from chunks to the packed tensors of a step, with array arithmetic instead of per-token Python."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.engine.grammar.interface import PendingMasks
from penstock.engine.kernels.interface import AttentionBatch
from penstock.engine.kernels.noise import row_keys
from penstock.engine.runner.rows import Flag, Rows
from penstock.engine.runner.sampler import SampleRequest
from penstock.engine.runner.staging import Staging
from penstock.engine.scheduler import Batch, Chunk


@dataclass(slots=True)
class StepInputs:
    """Device tensors of one step."""

    token_ids: Tensor
    attention: AttentionBatch
    sample_at: Tensor
    """int64 [S]: packed index of each sampling chunk's last token."""
    sampling: SampleRequest | None


class InputBuilder:
    """Builds the inputs of a step from the rows and the batch."""

    def __init__(self, rows: Rows, block_size: int) -> None:
        self.rows = rows
        self.block_size = block_size
        self._staging = Staging(rows.device)

    def build(self, batch: Batch) -> StepInputs:
        """Pack the batch. Tokens sampled by a step still in flight are taken from the device rows."""
        self.rows.update(batch)
        chunks, size = batch.chunks, self.block_size
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        lengths = np.array([chunk.length for chunk in chunks], np.int64)
        rows = np.array([chunk.seq.row for chunk in chunks], np.int64)
        ends = np.cumsum(lengths)
        query_starts = np.concatenate(([0], ends))
        owner = np.repeat(np.arange(len(chunks)), lengths)
        positions = np.arange(batch.num_tokens) - query_starts[owner] + starts[owner]
        slots = self.rows.host_tables[rows[owner], positions // size].astype(np.int64) * size + positions % size

        token_ids = np.zeros(batch.num_tokens, np.int64)
        on_device: list[int] = []
        for index, chunk in enumerate(chunks):
            known = chunk.seq.tokens[chunk.start : chunk.start + chunk.length]
            begin = query_starts[index]
            token_ids[begin : begin + len(known)] = known
            if len(known) < chunk.length:
                on_device.append(index)
        pending = np.array(on_device, np.int64)
        sampling = np.array([index for index, chunk in enumerate(chunks) if chunk.samples], np.int64)
        keys = row_keys(self.rows.seeds[rows[sampling]], (starts + lengths)[sampling])
        contexts = starts + lengths

        ids, at, slot, q_starts, context, row, last, sample_rows, sample_keys, hole, hole_rows = self._staging.upload(
            [
                token_ids,
                positions,
                slots,
                query_starts.astype(np.int32),
                contexts.astype(np.int32),
                rows.astype(np.int32),
                ends[sampling] - 1,
                rows[sampling],
                keys,
                ends[pending] - 1,
                rows[pending],
            ]
        )
        if on_device:
            ids[hole] = self.rows.last_tokens[hole_rows]
        attention = AttentionBatch(
            positions=at,
            slots=slot,
            query_starts=q_starts,
            context_lens=context,
            rows=row,
            block_tables=self.rows.block_tables,
            num_decodes=batch.num_decodes,
            max_query=int(lengths.max()),
            # CUDA kernels are compiled per bound; one bound for all steps keeps compilation out of traffic.
            max_context=int(contexts.max()) if ids.device.type == "cpu" else self.rows.max_context,
        )
        request = None
        if len(sampling):
            row_flags = self.rows.flags[rows[sampling]]
            request = _request([chunks[index] for index in sampling], sample_rows, sample_keys, row_flags, batch.masks)
        return StepInputs(ids, attention, last, request)

    def sampling(self, batch: Batch) -> SampleRequest:
        """The sampling side alone, for a batch in which every chunk samples."""
        rows = np.array([chunk.seq.row for chunk in batch.chunks], np.int64)
        ends = np.array([chunk.start + chunk.length for chunk in batch.chunks], np.int64)
        device_rows, keys = self._staging.upload([rows, row_keys(self.rows.seeds[rows], ends)])
        return _request(batch.chunks, device_rows, keys, self.rows.flags[rows], batch.masks)


def _request(
    chunks: list[Chunk], rows: Tensor, keys: Tensor, row_flags: np.ndarray, masks: PendingMasks | None
) -> SampleRequest:
    return SampleRequest(chunks, rows, keys, Flag(int(np.bitwise_or.reduce(row_flags))), row_flags, masks)


def chunk_targets(batch: Batch) -> list[tuple[int, int, Tensor]]:
    """For chunks that owe prompt log-probabilities: chunk index, first packed token, and the tokens to score."""
    targets: list[tuple[int, int, Tensor]] = []
    begin = 0
    for index, chunk in enumerate(batch.chunks):
        seq = chunk.seq
        if seq.prompt_logprobs is not None and chunk.start < seq.prompt_len - 1:
            # A resumed sequence recomputes positions it has already scored.
            skip = max(0, len(seq.prompt_logprobs) - 1 - chunk.start)
            wanted = seq.tokens[chunk.start + skip + 1 : min(chunk.start + chunk.length + 1, seq.prompt_len)]
            if wanted:
                targets.append((index, begin + skip, torch.tensor(wanted, dtype=torch.int64)))
        begin += chunk.length
    return targets
