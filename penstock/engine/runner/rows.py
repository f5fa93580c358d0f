"""Stable rows: what the device remembers of every running sequence between steps.

A running sequence owns one row in each tensor: its block table, its last sampled token, its sampling parameters.
Only differences are uploaded. The host keeps a mirror (the same memory on CPU) to compute slots from.
"""

from __future__ import annotations

from enum import IntFlag

import numpy as np
import torch
from torch import Tensor

from penstock.engine.backends.interface import DeviceAccess
from penstock.engine.batch import Batch
from penstock.engine.sequence import Sequence


class Flag(IntFlag):
    """Which parts of the sampler a row needs; a step runs the union over its rows."""

    RANDOM = 1
    FILTER = 2
    PENALTY = 4
    BIAS = 8
    MIN_TOKENS = 16
    LOGPROBS = 32
    GRAMMAR = 64
    """Also other rules about tokens: whatever is the sequence's matcher now."""
    TYPICAL = 128
    WATERMARK = 256


DRAWN = Flag.RANDOM | Flag.WATERMARK
"""What a draw with a temperature and a key does by itself."""


def flags_of(seq: Sequence) -> Flag:
    """What applies to a sequence in its next step."""
    flags, params = Flag(0), seq.params
    if not params.greedy:
        flags |= Flag.RANDOM
        if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0:
            flags |= Flag.FILTER
        if params.typical_p < 1.0:
            flags |= Flag.TYPICAL
        if params.watermark:
            flags |= Flag.WATERMARK
    if params.penalized:
        flags |= Flag.PENALTY
    if params.logit_bias:
        flags |= Flag.BIAS
    awaited = seq.thought is not None and seq.thought.awaited
    if (params.min_tokens > 0 or awaited) and params.stop_token_ids:
        flags |= Flag.MIN_TOKENS
    if params.logprobs is not None:
        flags |= Flag.LOGPROBS
    if seq.matcher is not None:
        flags |= Flag.GRAMMAR
    return flags


FLOATS = ("temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


class Rows:
    """Per-row tensors on the device and their host mirrors."""

    def __init__(
        self,
        max_rows: int,
        max_context: int,
        vocab_size: int,
        backend: DeviceAccess,
        block_size: int = 16,
        followed: int = ~0,
        one_by_one: bool = False,
    ) -> None:
        """`followed`: flags of the sampling parameters that are applied; a draft model leaves some out."""
        self.backend = backend
        self.device = device = backend.device
        self.followed = followed
        self.one_by_one = one_by_one
        """Sums over the vocabulary are made row by row: PyTorch's depend on how many rows there are."""
        self.vocab_size = vocab_size
        self.max_context = max_context
        max_blocks = -(-max_context // block_size)
        self.block_tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.floats = torch.zeros(max_rows, len(FLOATS), dtype=torch.float32, device=device)
        self.top_k = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._mirrored = not backend.in_host_memory
        """Whether the host's tables are a copy."""
        self.host_tables = np.zeros((max_rows, max_blocks), np.int32) if self._mirrored else self.block_tables.numpy()
        self.seeds = np.zeros(max_rows, np.uint64)
        self.flags = np.zeros(max_rows, np.uint16)
        self.byte_flags = np.zeros(max_rows, np.uint8)
        """The same in a byte: its last bit stands for all flags that do not fit."""
        self.output_counts: Tensor | None = None
        """int32 [max_rows, vocab]: how often each token was generated; only once a penalty was asked for."""
        self.prompt_seen: Tensor | None = None
        self._occupant: list[Sequence | None] = [None] * max_rows
        self._version = [0] * max_rows
        self._epoch = [0] * max_rows
        self._known_blocks = [0] * max_rows
        self._staging = backend.staging()
        self.mask_staging = backend.staging()
        """For grammar masks, which are uploaded later in a step than the rest."""

    def update(self, batch: Batch) -> None:
        """Bring the rows of a batch up to date with its sequences."""
        cells: list[tuple[int, int, int]] = []
        fresh: list[Sequence] = []
        started: list[Sequence] = []
        occupants, versions, blocks = self._occupant, self._version, self._known_blocks
        for chunk in batch.chunks:
            seq, row = chunk.seq, chunk.seq.row
            if occupants[row] is not seq or versions[row] != seq.row_version:
                if occupants[row] is not seq or self._epoch[row] != seq.epoch:
                    self._epoch[row] = seq.epoch
                    started.append(seq)
                occupants[row], versions[row] = seq, seq.row_version
                blocks[row] = 0
                fresh.append(seq)
            known = blocks[row]
            if known < len(seq.blocks):
                new = [block + seq.base for block in seq.blocks[known:]] if seq.base else seq.blocks[known:]
                self.host_tables[row, known : len(seq.blocks)] = new
                if self._mirrored:
                    cells.extend((row, known + col, block) for col, block in enumerate(new))
                blocks[row] = len(seq.blocks)
        if fresh:
            self._load_parameters(fresh)
        for seq in started:
            # Not where only flags changed: a token that is still pending has been counted here, and nowhere else.
            if self.flags[seq.row] & Flag.PENALTY:
                self._count_tokens(seq)
        if cells:
            flat = np.array(cells, np.int64)
            rows, cols, values = self._staging.upload([np.ascontiguousarray(flat[:, i]) for i in range(3)])
            self.block_tables[rows, cols] = values.to(torch.int32)

    def known_tokens(self, ids: Tensor, rows: Tensor) -> Tensor:
        """`ids` as far as the host knows them; in place of -1 the token that the row sampled last."""
        return torch.where(ids >= 0, ids, self.last_tokens[rows])

    def needs(self, batch: Batch, flags: int) -> bool:
        """Whether any row of the batch has one of `flags`."""
        return any(int(self.flags[chunk.seq.row]) & flags for chunk in batch.chunks)

    @torch.inference_mode()
    def count(self, seq: Sequence, tokens: list[int]) -> None:
        """Count generated tokens for the penalties of a running sequence."""
        if self.output_counts is not None and seq.params.penalized and seq.row >= 0:
            (ids,) = self._staging.upload([np.array(tokens, np.int64)])
            self.output_counts[seq.row].index_put_((ids,), self.output_counts.new_ones(len(tokens)), accumulate=True)

    def _load_parameters(self, sequences: list[Sequence]) -> None:
        rows = np.array([seq.row for seq in sequences], np.int64)
        floats = np.array([[getattr(seq.params, name) for name in FLOATS] for seq in sequences], np.float32)
        top_k = np.array([seq.params.top_k for seq in sequences], np.int64)
        self.seeds[rows] = np.array([seq.params.seed & (2**64 - 1) for seq in sequences], np.uint64)
        flags = np.array([int(flags_of(seq)) & self.followed for seq in sequences], np.uint16)
        self.flags[rows] = flags
        self.byte_flags[rows] = np.where(flags > 255, flags | 128, flags).astype(np.uint8)
        at, values, ks = self._staging.upload([rows, floats.reshape(-1), top_k])
        self.floats[at] = values.view(len(sequences), len(FLOATS))
        self.top_k[at] = ks

    def _count_tokens(self, seq: Sequence) -> None:
        if self.output_counts is None or self.prompt_seen is None:
            shape = (len(self._occupant), self.vocab_size)
            # Some steps begin in inference mode and some outside it: these are written in both.
            with torch.inference_mode(mode=False):
                self.output_counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
                self.prompt_seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
        prompt = torch.tensor(seq.tokens[seq.virtual : seq.prompt_len], dtype=torch.int64)
        output = torch.tensor(seq.tokens[seq.prompt_len :], dtype=torch.int64)
        counts = torch.bincount(output, minlength=self.vocab_size).to(torch.int32)
        seen = torch.zeros(self.vocab_size, dtype=torch.bool)
        seen[prompt] = True
        self.output_counts[seq.row] = counts.to(self.device)
        self.prompt_seen[seq.row] = seen.to(self.device)
