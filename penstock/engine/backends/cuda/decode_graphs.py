"""Decode steps as CUDA graphs: one launch from the host instead of several hundred. `prompt_graphs` does the same for
short prompts.

A graph is captured per batch size of a small set (buckets); a batch runs in the next larger bucket, padded with a
scratch row whose writes land in block 0. Buckets that few batches need are captured after the start (`deferred`).
Everything a replay reads lies at fixed addresses: the device rows, and one packed buffer per bucket that is filled with
a single copy. The graph ends with the sampled tokens already stored in the rows, so the next step can be launched
before the host has read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.adapters.apply import TABLES, GraphLora
from penstock.engine.adapters.runtime import slots_of
from penstock.engine.backends.cuda.capture import GraphPool, record, watched
from penstock.engine.backends.cuda.deferred import Deferred, LaterCaptures
from penstock.engine.backends.cuda.packed_inputs import Field, PackedInputs
from penstock.engine.backends.cuda.rehearsal import Short
from penstock.engine.backends.cuda.state_fields import STATE_FIELDS, View, by_name, state_batch, steps_have_states
from penstock.engine.backends.interface import AttentionBatch, Followers, HostBatch
from penstock.engine.batch import Batch
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.decoder import Decoder
from penstock.engine.runner.follower import BlockTables
from penstock.engine.runner.inputs import chunk_tokens, decode_keys, entries, states_of
from penstock.engine.runner.rows import FLOATS, Rows

_FIELDS = (("ids", np.int64), ("positions", np.int64), ("slots", np.int64), ("keys", np.int64),
           ("rows64", np.int64), ("stores", np.int64), ("rows", np.int32), ("contexts", np.int32))  # fmt: skip
_ALL_UP_TO = 8
"""Numbers of rows up to which every graph is captured at the start; above, powers of two."""
_WANTED = 64
"""Steps with a few padding rows that are as long as capturing one of the right size."""
_LORA_FIELDS = tuple((name, np.int32) for name in TABLES)


def buckets_up_to(limit: int) -> list[int]:
    """Batch sizes that get a graph: fine-grained where a step is short, multiples of eight above."""
    sizes = [1, 2, 3, 4, 6, 8, *range(16, limit, 8), limit]
    return sorted({size for size in sizes if size <= limit})


class Kind(IntEnum):
    """Which steps a set of graphs is for; ranks name it to each other."""

    DECODES = 0
    ADAPTED = 1
    """Decodes of which some use an adapter."""
    NARROW = 2
    """The same with narrow adapters only; see `LoadedAdapter`."""
    PROMPTS = 3
    FURTHER = 4
    """Decodes of which some use an adapter that touches linears that few do; see `Site`."""
    ALTERED = 5
    """Decodes of which some use an adapter that changes single outputs or norms; see `AdaptedModel`."""
    LONG = 6
    """Decodes without adapters of which some have a longer context than `Decoder.captured_context`."""


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: PackedInputs
    logits: Tensor
    tokens: Tensor


class DecodeGraphs(LaterCaptures[int]):
    """Graphs of pure decode steps, made at start or when a size first occurs."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        rows: Rows | BlockTables,
        *,
        max_rows: int,
        pool: GraphPool,
        max_tokens: int = 0,
        lora: GraphLora | None = None,
        followers: Followers | None = None,
        kind: Kind = Kind.DECODES,
    ) -> None:
        """`max_tokens`: largest step, when it may hold more tokens than rows (draft tokens to verify)."""
        self.followers = followers
        self.kind = kind
        self.decoder = decoder
        self.lora = lora
        self.fields: tuple[tuple[str, Any], ...] = _FIELDS if lora is None else _FIELDS + _LORA_FIELDS
        self._stateful = steps_have_states(decoder, kv)
        if self._stateful:
            self.fields += STATE_FIELDS
        self.kv = kv
        self.rows = rows
        self.scratch_row = max_rows
        self.padding = {"rows64": max_rows, "stores": max_rows, "rows": max_rows, "contexts": 1, "lora_tokens": -1}
        self.buckets = buckets_up_to(max(max_rows, max_tokens))
        self._later = Deferred[int](_WANTED)
        self._captured: dict[int, _Captured] = {}
        self.pool = pool
        self._short = Short(decoder, kv)
        self._block_size = kv.block_size
        self._starts = torch.arange(self.buckets[-1] + 1, dtype=torch.int32, device=kv.device)

    def fits(self, batch: Batch) -> bool:
        """Whether every chunk decodes and a graph is large enough."""
        if batch.num_tokens > self.buckets[-1]:
            return False
        return batch.plain or all(chunk.samples and chunk.decodes for chunk in batch.chunks)

    def for_long_contexts(self) -> DecodeGraphs:
        """Further graphs over the same rows and cache, for contexts of any length."""
        return DecodeGraphs(
            self.decoder,
            self.kv,
            self.rows,
            max_rows=self.scratch_row,
            pool=self.pool,
            max_tokens=self.buckets[-1],
            followers=self.followers,
            kind=Kind.LONG,
        )

    def with_adapters(self, decoder: Decoder, lora: GraphLora, kind: Kind) -> DecodeGraphs:
        """Further graphs over the same rows and cache, in which sequences may use adapters."""
        return DecodeGraphs(
            decoder,
            self.kv,
            self.rows,
            max_rows=self.scratch_row,
            pool=self.pool,
            max_tokens=self.buckets[-1],
            lora=lora,
            followers=self.followers,
            kind=kind,
        )

    def replay(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run a batch of decodes; its logits [B, vocab] and sampled tokens [B], valid until the next replay of any
        graph of `pool`.

        Of several tokens of one row (draft tokens being verified) the last one's sample stays in the row.
        The tokens follow temperature and seed alone; rows that need more are sampled again from the logits.
        """
        count = batch.num_tokens
        bucket, captured = self._find(count)
        assert isinstance(self.rows, Rows)
        self.rows.update(batch)
        positions, _, rows, _ = entries(batch)
        # A token the host does not know yet (-1) is the one the row sampled last.
        ids = np.array([token for chunk in batch.chunks for token in chunk_tokens(chunk) or (-1,)], np.int64)
        size = self._block_size
        slots = self.rows.host_tables[rows, positions // size].astype(np.int64) * size + positions % size
        values = {
            "ids": ids,
            "positions": positions,
            "slots": slots,
            "keys": decode_keys(batch, self.rows, rows, positions + 1),
            "rows64": rows,
            "stores": self._stores(batch, rows),
            "rows": rows,
            "contexts": positions + 1,
        }
        if self.lora is not None:
            values |= self.lora.tables(slots_of(batch), bucket)
        if (states := states_of(batch)) is not None:
            values |= by_name(states)
        packed = captured.inputs.fill(values, self.padding)
        if self.followers is not None:
            host = HostBatch(ids, positions, slots, positions, positions + 1, rows, self.rows.host_tables, size)
            self.followers.replay(self.kind, (bucket, 0), packed, host)
        captured.inputs.upload()
        captured.graph.replay()
        return captured.logits[:count], captured.tokens[:count]

    def make_ready(self, count: int) -> None:
        """Capture what a step of so many tokens needs, if there is none yet."""
        self._find(count)

    def _find(self, count: int) -> tuple[int, _Captured]:
        """The graph for a step of so many tokens, captured now if it has to be; a larger one where that fails."""
        bucket = self._later.choose(size for size in self.buckets if size >= count)
        assert bucket is not None, "the largest is captured at the start"
        try:
            return bucket, self._captured.get(bucket) or self.capture(bucket)
        except RuntimeError as error:  # such as no memory for another
            if bucket not in self._later:
                raise
            self._later.give_up(error)
            return self._find(count)

    def follow(self, bucket: int, packed: npt.NDArray[np.uint8]) -> None:
        """Run a step that rank 0 has packed."""
        captured = self._captured[bucket]
        captured.inputs.load(packed)
        captured.graph.replay()

    def _stores(self, batch: Batch, rows: np.ndarray) -> np.ndarray:
        """The row that keeps each sample."""
        if not batch.speculative:
            return rows
        last = np.cumsum([chunk.length for chunk in batch.chunks]) - 1
        stores = np.full_like(rows, self.scratch_row)
        stores[last] = rows[last]
        return stores

    def forget(self) -> list[int]:
        """Drop every graph, because what they read is about to move; the sizes to capture again at once, largest first.
        Others are captured later again."""
        sizes = [size for size in sorted(self._captured, reverse=True) if self._at_start(size)]
        self._later.add(sorted(self._captured.keys() - set(sizes)))
        self._captured.clear()
        self.pool.forget()
        self._short.forget()
        return sizes

    def capture_all(self) -> None:
        """Capture the buckets that stand in for all others, largest first, so that the smaller ones fit into its
        memory; the rest later."""
        for bucket in reversed(self.buckets):
            if self._at_start(bucket) and bucket not in self._captured:
                self.capture(bucket)
        self._later.add(bucket for bucket in self.buckets if bucket not in self._captured)

    def _at_start(self, bucket: int) -> bool:
        return bucket <= _ALL_UP_TO or bucket.bit_count() == 1 or bucket == self.buckets[-1]

    def capture(self, bucket: int) -> _Captured:
        """Capture the step of `bucket` rows."""
        if self.followers is not None:
            self.followers.capture(self.kind, (bucket, 0))
        inputs = PackedInputs([Field(name, kind, bucket) for name, kind in self.fields], self.kv.device)
        inputs.send({name: np.zeros(0, kind) for name, kind in self.fields}, self.padding)
        recording = record(
            self.kv.device,
            lambda: self.step(inputs.view, bucket),
            self.pool,
            lambda: self.step(inputs.view, bucket, *self._short.parts),
        )
        captured = _Captured(recording.graph, inputs, *recording.results)
        self._captured[bucket] = captured
        self._later.done(bucket)
        return captured

    def step(
        self, view: View, bucket: int, decoder: Decoder | None = None, kv: KVCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """The work of a decode step, on fixed addresses; its logits and tokens. `decoder`, `kv`: with other layers."""
        rows = view("rows64", torch.int64)
        ids = self.rows.known_tokens(view("ids", torch.int64), rows)
        batch = AttentionBatch(
            positions=view("positions", torch.int64),
            slots=view("slots", torch.int64),
            query_starts=self._starts[: bucket + 1],
            context_lens=view("contexts", torch.int32),
            rows=view("rows", torch.int32),
            block_tables=self.rows.block_tables,
            num_decodes=bucket,
            max_query=1,
            max_context=self.rows.max_context,
            longest=self.rows.max_context if self.kind is Kind.LONG else self.decoder.captured_context,
        )
        if self._stateful:
            batch.states = state_batch(view)
        if self.lora is not None:
            tables = {name: view(name, torch.int32) for name in TABLES}
            self.lora.use(tables, bucket, alters=self.kind is Kind.ALTERED)
        hidden = (decoder or self.decoder).forward(ids, batch, watched(kv or self.kv))
        logits = self.decoder.head(hidden)
        if isinstance(self.rows, BlockTables):
            return logits, logits  # rank 0 samples
        temperatures = self.rows.floats[rows, FLOATS.index("temperature")]
        tokens = self.decoder.ops.gumbel_argmax(logits, temperatures, view("keys", torch.int64))
        self.rows.last_tokens[view("stores", torch.int64)] = tokens
        return logits, tokens
