"""Input preparation: from chunks to the packed arrays of a step, with array arithmetic instead of per-token Python.

A chunk that verifies draft tokens is packed as that many decodes of one row: each token attends over its own context
with the decode kernel, so it is computed as it would have been without speculation, and in the same CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch, HostBatch, Ints, StateBatch, attended
from penstock.engine.batch import Batch, Chunk
from penstock.engine.noise import row_keys
from penstock.engine.runner.rows import Flag, Rows
from penstock.engine.runner.sampler import SampleRequest


@dataclass(slots=True)
class Packed:
    """One step as arrays on the host."""

    host: HostBatch
    num_decodes: int
    max_query: int
    sample_at: Ints
    """int64 [S]: packed index of every token behind which something is sampled."""
    sample_rows: Ints
    row_flags: np.ndarray
    """uint16 [S]: see `Flag`."""
    seeds: np.ndarray
    """uint64 [S]."""
    holes: Ints
    """Packed indices of tokens that only the device knows: those their rows sampled last."""
    hole_rows: Ints
    batch: Batch | None = None
    """None: nothing is sampled."""

    @property
    def flags(self) -> Flag:
        """Union over the rows."""
        return Flag(int(np.bitwise_or.reduce(self.row_flags)))

    def keys(self) -> Ints:
        """int64 [S]: noise keys."""
        positions = self.host.positions[self.sample_at] + 1
        keys = row_keys(self.seeds, positions)
        return keys if self.batch is None else watermarked(self.batch, keys, positions, self.row_flags)


@dataclass(slots=True)
class StepInputs:
    """Device tensors of one step."""

    token_ids: Tensor
    attention: AttentionBatch
    sample_at: Tensor
    """As in `Packed`."""
    sampling: SampleRequest | None


class InputBuilder:
    """Builds the inputs of a step from the rows and the batch: `pack` on the host, `upload` where it is needed."""

    def __init__(self, rows: Rows, block_size: int, *, keep_host: bool = False, alone: bool = False) -> None:
        """`keep_host`: steps carry their inputs as host arrays too, for other ranks. `alone`: every token attends on
        its own, in prompts too, so that results do not depend on how prompts are cut into chunks."""
        self.rows = rows
        self.alone = alone
        self.keep_host = keep_host
        self.block_size = block_size
        self._staging = rows.backend.staging()
        self._state_staging = rows.backend.staging()

    def pack(self, batch: Batch) -> Packed:
        """The batch as arrays; the rows are brought up to date with it."""
        self.rows.update(batch)
        size, tables = self.block_size, self.rows.host_tables
        starts, lengths, rows, samples = single_tokens(batch) if self.alone else entries(batch)
        ends = np.cumsum(lengths)
        query_starts = np.concatenate(([0], ends))
        owner = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(batch.num_tokens) - query_starts[owner] + starts[owner]
        slots = tables[rows[owner], positions // size].astype(np.int64) * size + positions % size
        token_ids = np.zeros(batch.num_tokens, np.int64)
        unknown: list[tuple[int, int]] = []
        end = 0
        for chunk in batch.chunks:
            begin, end = end, end + chunk.length
            known = chunk_tokens(chunk)
            token_ids[begin : begin + len(known)] = known
            if len(known) < chunk.length:
                unknown.append((end - 1, chunk.seq.row))
        holes = np.array(unknown, np.int64).reshape(-1, 2)
        if unknown and self.rows.backend.in_host_memory:
            token_ids[holes[:, 0]] = self.rows.last_tokens.numpy()[holes[:, 1]]
            holes = holes[:0]
        sampling = np.flatnonzero(samples)
        sample_rows = rows[sampling]
        return Packed(
            HostBatch(
                token_ids, positions, slots, query_starts, starts + lengths, rows, tables, size, states_of(batch)
            ),
            num_decodes=batch.num_tokens if self.alone else batch.num_decodes,
            max_query=int(lengths.max()),
            sample_at=ends[sampling] - 1,
            sample_rows=sample_rows,
            row_flags=self.rows.flags[sample_rows],
            seeds=self.rows.seeds[sample_rows],
            holes=np.ascontiguousarray(holes[:, 0]),
            hole_rows=np.ascontiguousarray(holes[:, 1]),
            batch=batch,
        )

    def upload(self, batch: Batch, packed: Packed) -> StepInputs:
        """The same on the device. Tokens sampled by a step still in flight are taken from the device rows."""
        host = packed.host
        ids, at, slot, q_starts, context, row, last, sample_rows, sample_keys, hole, hole_rows = self._staging.upload(
            [
                host.token_ids,
                host.positions,
                host.slots,
                host.query_starts.astype(np.int32),
                host.context_lens.astype(np.int32),
                host.rows.astype(np.int32),
                packed.sample_at,
                packed.sample_rows,
                packed.keys(),
                packed.holes,
                packed.hole_rows,
            ]
        )
        if len(packed.holes):
            ids[hole] = self.rows.last_tokens[hole_rows]
        states = None
        if host.states is not None:
            states = StateBatch(*self._state_staging.upload([*host.states.astype(np.int32)]))
        attention = AttentionBatch(
            positions=at,
            slots=slot,
            query_starts=q_starts,
            context_lens=context,
            rows=row,
            block_tables=self.rows.block_tables,
            num_decodes=packed.num_decodes,
            max_query=packed.max_query,
            max_context=self._max_context(host),
            longest=int(host.context_lens.max()),
            total_context=int(host.context_lens[packed.num_decodes :].sum()),
            attended=attended(host.query_starts, host.context_lens, packed.num_decodes),
            host=host if self.keep_host else None,
            states=states,
        )
        request = None
        if len(packed.sample_at):
            request = _request(batch, sample_rows, sample_keys, packed.row_flags)
        return StepInputs(ids, attention, last, request)

    def _max_context(self, host: HostBatch) -> int:
        """The context bound of a step: one for all steps where kernels are compiled per bound, so that none is compiled
        while requests wait."""
        rows = self.rows
        return rows.max_context if rows.backend.bounds_are_compiled else int(host.context_lens.max())

    def sampling_of(self, batch: Batch, packed: Packed) -> SampleRequest:
        """What sampling needs of a packed batch."""
        rows, keys = self._staging.upload([packed.sample_rows, packed.keys()])
        return _request(batch, rows, keys, packed.row_flags)

    def sampling(self, batch: Batch) -> SampleRequest:
        """The same for a batch in which every chunk samples and which has not been packed."""
        starts, lengths, rows, _ = entries(batch)
        device_rows, keys = self._staging.upload([rows, decode_keys(batch, self.rows, rows, starts + lengths)])
        return _request(batch, device_rows, keys, self.rows.flags[rows])


def decode_keys(batch: Batch, state: Rows, rows: Ints, positions: Ints) -> Ints:
    """int64: noise keys of a batch in which every entry samples; `positions` of the tokens to be sampled."""
    return watermarked(batch, row_keys(state.seeds[rows], positions), positions, state.flags[rows])


def watermarked(batch: Batch, keys: Ints, positions: Ints, flags: np.ndarray) -> Ints:
    """`keys`, with those of sequences that are watermarked replaced by their own."""
    if not (flags & Flag.WATERMARK).any():
        return keys
    keys, end = keys.copy(), 0
    for chunk in batch.chunks:
        if not chunk.samples:
            continue
        begin, end = end, end + 1 + len(chunk.drafts)
        seq, state = chunk.seq, chunk.seq.watermark
        if state is not None and flags[begin] & Flag.WATERMARK:
            ahead = state.drafted or chunk.drafts
            keys[begin:end] = state.keys(seq.tokens, ahead, int(positions[begin]), keys[begin:end])
    return keys


def decode_entries(chunks: list[Chunk]) -> list[int]:
    """Token, position and row of every chunk of a plain batch, one after the other; see `RecordedStep.load_decodes`."""
    flat: list[int] = []
    for chunk in chunks:
        seq, start = chunk.seq, chunk.start
        tokens = seq.tokens
        flat += (tokens[start] if start < len(tokens) else -1, start, seq.row)
    return flat


def chunk_tokens(chunk: Chunk) -> list[int]:
    """The chunk's tokens as far as the host knows them, draft tokens included."""
    if chunk.drafts:
        return [chunk.seq.tokens[chunk.start], *chunk.drafts]
    return chunk.seq.tokens[chunk.start : chunk.start + chunk.length]


def entries(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Start, length and row of what attends on its own (a decoded token, a chunk of a prompt); whether it samples."""
    chunks = batch.chunks
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    lengths = np.array([chunk.length for chunk in chunks], np.int64)
    rows = np.array([chunk.seq.row for chunk in chunks], np.int64)
    samples = np.array([chunk.samples for chunk in chunks], np.bool_)
    if batch.speculative:
        counts = np.array([1 + len(chunk.drafts) for chunk in chunks], np.int64)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = np.repeat(starts, counts) + within
        lengths = np.repeat(lengths - counts + 1, counts)
        rows, samples = np.repeat(rows, counts), np.repeat(samples, counts)
    return starts, lengths, rows, samples


def states_of(batch: Batch) -> Ints | None:
    """[4, T]: the fields of `StateBatch`; None where no layer keeps states."""
    chunks = batch.chunks
    if not chunks[0].writes:
        return None
    lengths = np.array([chunk.length for chunk in chunks], np.int64)
    ends = np.cumsum(lengths)
    firsts = np.repeat(ends - lengths, lengths)
    lasts = np.repeat(ends - 1, lengths)
    reads = np.repeat(np.array([chunk.read for chunk in chunks], np.int64), lengths)
    writes = np.zeros(batch.num_tokens, np.int64)
    for end, chunk in zip(ends.tolist(), chunks, strict=True):
        writes[end - len(chunk.writes) : end] = chunk.writes
    return np.stack((firsts, lasts, reads, writes))


def single_tokens(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """As `entries`, with every token an entry of its own."""
    lengths = np.array([chunk.length for chunk in batch.chunks], np.int64)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    starts = np.repeat(np.array([chunk.start for chunk in batch.chunks], np.int64), lengths) + within
    rows = np.repeat(np.array([chunk.seq.row for chunk in batch.chunks], np.int64), lengths)
    # A chunk samples behind its last token, and behind as many before it as it has draft tokens.
    sampled = np.array([1 + len(chunk.drafts) if chunk.samples else 0 for chunk in batch.chunks], np.int64)
    samples = within >= np.repeat(lengths - sampled, lengths)
    return starts, np.ones_like(starts), rows, samples


def _request(batch: Batch, rows: Tensor, keys: Tensor, row_flags: np.ndarray) -> SampleRequest:
    ahead = None
    if batch.speculative:
        ahead = np.concatenate([np.arange(1 + len(chunk.drafts)) for chunk in batch.chunks if chunk.samples])
    flags = Flag(int(np.bitwise_or.reduce(row_flags)))
    return SampleRequest(sampling_chunks(batch), rows, keys, flags, row_flags, batch.masks, ahead)


def sampling_chunks(batch: Batch) -> list[Chunk]:
    """The chunk of every token that the batch samples."""
    return [chunk for chunk in batch.chunks if chunk.samples for _ in range(1 + len(chunk.drafts))]


def chunk_targets(batch: Batch) -> list[tuple[int, int, Tensor]]:
    """For chunks with prompt log-probabilities: chunk index, first packed token, and the tokens to score."""
    targets: list[tuple[int, int, Tensor]] = []
    begin = 0
    for index, chunk in enumerate(batch.chunks):
        seq = chunk.seq
        if seq.prompt_logprobs is not None and chunk.start < seq.prompt_len - 1:
            # A resumed sequence recomputes positions it has already scored. Virtual tokens have no scores.
            skip = max(0, seq.virtual + len(seq.prompt_logprobs) - 1 - chunk.start)
            wanted = seq.tokens[chunk.start + skip + 1 : min(chunk.start + chunk.length + 1, seq.prompt_len)]
            if wanted:
                targets.append((index, begin + skip, torch.tensor(wanted, dtype=torch.int64)))
        begin += chunk.length
    return targets
