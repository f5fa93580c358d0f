"""Decode steps as CUDA graphs: one launch from the host instead of several hundred. `prompt_graphs` does the same for
short prompts.

A graph is captured per batch size of a small set (buckets); a batch runs in the next larger bucket, padded with a
scratch row whose writes land in block 0. Buckets that few batches need are captured after the start (`deferred`).
Everything a replay reads lies at fixed addresses: the device rows, and one
packed buffer per bucket that is filled with a single copy. The graph ends with the sampled tokens already stored in
the rows, so the next step can be launched before the host has read them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.adapters.apply import TABLES, GraphLora
from penstock.engine.adapters.runtime import is_narrow, slots_of
from penstock.engine.backends.cuda.capture import Interrupted, interruptible, record, watched
from penstock.engine.backends.cuda.deferred import Deferred
from penstock.engine.backends.cuda.draw_chains import DrawChains
from penstock.engine.backends.cuda.packed_inputs import Field, PackedInputs
from penstock.engine.backends.cuda.prompt_graphs import PromptGraphs, Shape
from penstock.engine.backends.cuda.rehearsal import Short
from penstock.engine.backends.cuda.state_fields import STATE_FIELDS, View, by_name, state_batch, steps_have_states
from penstock.engine.backends.interface import AttentionBatch, Followers, HostBatch
from penstock.engine.batch import Batch
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.decoder import Decoder
from penstock.engine.runner.eager import EagerExecutor
from penstock.engine.runner.follower import BlockTables, Follower, FollowerResources
from penstock.engine.runner.inputs import chunk_tokens, decode_keys, entries, sampling_chunks, states_of
from penstock.engine.runner.resources import RunnerResources
from penstock.engine.runner.rows import DRAWN, FLOATS, Rows
from penstock.engine.runner.step import DrawnAhead, PendingStep
from penstock.engine.sequence import Sequence

_FIELDS = (("ids", np.int64), ("positions", np.int64), ("slots", np.int64), ("keys", np.int64),
           ("rows64", np.int64), ("stores", np.int64), ("rows", np.int32), ("contexts", np.int32))  # fmt: skip
_ALL_UP_TO = 8
"""Numbers of rows up to which every graph is captured at the start; above, powers of two."""
_WANTED = 64
"""Steps with a few padding rows that are as long as capturing one of the right size."""
_CAPTURE_S = 0.02
"""What capturing a step may take; measured from the first one on."""
_SAFE, _SMOOTH = 1.2, 0.3
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


class GraphExecutor(EagerExecutor):
    """Replays decode steps and short prompt steps; all others are launched kernel by kernel."""

    phase = "graphs"
    prefers_single_tokens = True

    def __init__(self, resources: RunnerResources) -> None:
        super().__init__(resources)
        self.graphs = DecodeGraphs(
            resources.decoder.captured(),
            resources.kv,
            resources.rows,
            max_rows=resources.max_rows,
            max_tokens=resources.max_verified,
            followers=resources.decoder.followers,
        )
        self.prompt_graphs: PromptGraphs | None = None
        """None in deterministic mode, which computes prompts token by token."""
        if not self._inputs.alone:
            self.prompt_graphs = PromptGraphs(
                resources.decoder.captured(),
                resources.kv,
                resources.rows,
                max_rows=resources.max_rows,
                followers=resources.decoder.followers,
                kind=Kind.PROMPTS,
            )
        self._capture_s = _CAPTURE_S
        """What a capture takes, and a bit more."""
        self.chains: DrawChains | None = None
        """For drafters that draw several tokens at once."""
        if resources.drawn_ahead:
            self.chains = DrawChains(self.graphs, resources.drawn_ahead)
        self.adapted_graphs: DecodeGraphs | None = None
        """For steps in which some sequence uses an adapter."""
        self.narrow_graphs: DecodeGraphs | None = None
        """For steps in which all adapters are narrow; see `LoadedAdapter`."""
        self._expects_experts = False
        """Whether slots have room for experts, so that such adapters are to come; else steps are captured when they
        occur."""
        self.further_graphs: DecodeGraphs | None = None
        """For steps in which some adapter touches linears that few do."""
        adapters = resources.adapters
        if adapters is not None and isinstance(adapters.kernel, GraphLora):
            self.adapted_graphs = self.graphs.with_adapters(adapters.decoder.captured(), adapters.kernel, Kind.ADAPTED)
            if adapters.further is not None:
                further = adapters.further.captured()
                self._expects_experts = any(site.experts for site in adapters.layout.sites)
                self.further_graphs = self.graphs.with_adapters(further, adapters.kernel, Kind.FURTHER)
            if adapters.narrow is not None:
                narrow = adapters.narrow.captured()
                self.narrow_graphs = self.graphs.with_adapters(narrow, adapters.kernel, Kind.NARROW)

    @torch.inference_mode()
    def run(self, batch: Batch) -> PendingStep:
        graphs = self._graphs_for(batch)
        if graphs is None:
            return self._run_prompts(batch)
        # The graph samples plain rows itself; others are sampled again from its logits.
        step = PendingStep(batch, self._rows, sampling_chunks(batch))
        logits, tokens = graphs.replay(batch)
        if self._rows.needs(batch, ~DRAWN):
            self._sample(step, logits, self._inputs.sampling(batch))
        else:
            (step.tokens,), step.event = self._backend.to_host(tokens)
        return step

    @torch.inference_mode()
    def draw_ahead(self, counts: Mapping[Sequence, int]) -> DrawnAhead | None:
        if self.chains is None or not self.chains.fits(counts):
            return None
        if any(int(self._rows.flags[seq.row]) & ~DRAWN for seq in counts):
            return None  # sampled from the logits, outside of the graph
        (tokens,), event = self._backend.to_host(self.chains.replay(counts))
        return DrawnAhead(dict(counts), tokens, event)

    def _run_prompts(self, batch: Batch) -> PendingStep:
        packed, adapted = self._inputs.pack(batch), self._begin_adapters(batch)
        shape = None if adapted or self.prompt_graphs is None else self.prompt_graphs.shape_of(batch)
        if self.prompt_graphs is None or shape is None:
            return self._launch(batch, packed, adapted or self._decoder)
        step = PendingStep(batch, self._rows, sampling_chunks(batch))
        logits, tokens = self.prompt_graphs.replay(packed, shape)
        if packed.flags & ~DRAWN:
            self._sample(step, logits, self._inputs.sampling_of(batch, packed))
        elif step.chunks:
            (step.tokens,), step.event = self._backend.to_host(tokens)
        return step

    def prepare(self, token_budget: int) -> None:
        for graphs in self._all():
            if graphs is not self.further_graphs or self._expects_experts:
                graphs.capture_all()
        if self.chains is not None:
            self.chains.capture_all()
        if self.prompt_graphs is not None:
            self.prompt_graphs.capture_all(token_budget)

    @torch.inference_mode()
    def improve(self, urgent: Callable[[], bool] = lambda: False) -> bool:
        try:
            # Ranks that follow capture the same step, and are not told that it was broken off.
            with nullcontext() if self.graphs.followers else interruptible(urgent):
                return self._capture_next()
        except Interrupted:
            return True

    @torch.inference_mode()
    def catch_up(self, spare_s: float) -> bool:
        found = [graphs for graphs in (*self._all(), self.prompt_graphs) if graphs is not None and graphs.due]
        if not found or spare_s < self._capture_s:
            return False
        began = time.perf_counter()
        until = began + spare_s
        try:
            with nullcontext() if self.graphs.followers else interruptible(lambda: time.perf_counter() > until):
                found[0].capture_due()
        except Interrupted:
            self._capture_s = 1.5 * spare_s
        except Exception:  # no memory is left for another, and a step that has to wait for one would fail
            for graphs in (*self._all(), self.prompt_graphs):
                if graphs is not None:
                    graphs.only_when_idle()
            raise
        else:
            self._capture_s += _SMOOTH * (_SAFE * (time.perf_counter() - began) - self._capture_s)
        return True

    def _capture_next(self) -> bool:
        if any(graphs.capture_next() for graphs in self._all()):
            return True
        return self.prompt_graphs is not None and self.prompt_graphs.capture_next()

    def release(self) -> Callable[[], None]:
        sizes = [(graphs, graphs.forget()) for graphs in self._all()]
        shapes = [] if self.prompt_graphs is None else self.prompt_graphs.forget()
        chains = [] if self.chains is None else self.chains.forget()

        def capture_again() -> None:
            for graphs, captured in sizes:
                for size in captured:
                    graphs.capture(size)
            for chain in chains:
                assert self.chains is not None
                self.chains.capture(chain)
            for shape in shapes:
                assert self.prompt_graphs is not None
                self.prompt_graphs.capture(shape)

        return capture_again

    def _all(self) -> list[DecodeGraphs]:
        found = (self.graphs, self.adapted_graphs, self.narrow_graphs, self.further_graphs)
        return [graphs for graphs in found if graphs is not None]

    def _graphs_for(self, batch: Batch) -> DecodeGraphs | None:
        """The graphs that can run a batch; None when it has to be launched kernel by kernel."""
        if not self.graphs.fits(batch):
            return None
        adapters = self._adapters
        if adapters is None or (not adapters.model.always and all(chunk.seq.slot < 0 for chunk in batch.chunks)):
            return self.graphs
        if self.further_graphs is not None and adapters.touches_further(batch):
            return self.further_graphs
        return self.narrow_graphs if self.narrow_graphs is not None and is_narrow(batch) else self.adapted_graphs


class GraphFollower(Follower):
    """The graphs of a rank that follows rank 0; see `Follower`."""

    def __init__(self, resources: FollowerResources) -> None:
        tables = BlockTables(resources.block_tables, resources.max_context)
        max_rows = resources.max_rows
        plain = DecodeGraphs(resources.decoder, resources.kv, tables, max_rows=max_rows)
        self.decodes = {Kind.DECODES: plain}
        self.prompts = PromptGraphs(resources.decoder, resources.kv, tables, max_rows=max_rows)
        if isinstance(resources.lora, GraphLora):
            kinds = (
                (Kind.ADAPTED, resources.adapted),
                (Kind.NARROW, resources.narrow),
                (Kind.FURTHER, resources.further),
            )
            for kind, decoder in kinds:
                if decoder is not None:
                    self.decodes[kind] = plain.with_adapters(decoder, resources.lora, kind)

    @torch.inference_mode()
    def capture(self, kind: int, shape: tuple[int, int]) -> None:
        if kind == Kind.PROMPTS:
            self.prompts.capture(Shape(*shape))
        else:
            self.decodes[Kind(kind)].capture(shape[0])

    @torch.inference_mode()
    def replay(self, kind: int, shape: tuple[int, int], inputs: npt.NDArray[np.uint8]) -> None:
        if kind == Kind.PROMPTS:
            self.prompts.follow(Shape(*shape), inputs)
        else:
            self.decodes[Kind(kind)].follow(shape[0], inputs)

    def release(self) -> Callable[[], None]:
        for graphs in self.decodes.values():
            graphs.forget()
        self.prompts.forget()
        return lambda: None  # rank 0 says what to capture again


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: PackedInputs
    logits: Tensor
    tokens: Tensor


class DecodeGraphs:
    """Graphs of pure decode steps, made at start or when a size first occurs."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        rows: Rows | BlockTables,
        *,
        max_rows: int,
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
        self._pool: Any = None
        self._short = Short(decoder, kv)
        self._block_size = kv.block_size

    def fits(self, batch: Batch) -> bool:
        """Whether every chunk decodes and a graph is large enough."""
        if batch.num_tokens > self.buckets[-1]:
            return False
        return batch.plain or all(chunk.samples and chunk.decodes for chunk in batch.chunks)

    def with_adapters(self, decoder: Decoder, lora: GraphLora, kind: Kind) -> DecodeGraphs:
        """Further graphs over the same rows and cache, in which sequences may use adapters."""
        return DecodeGraphs(
            decoder,
            self.kv,
            self.rows,
            max_rows=self.scratch_row,
            max_tokens=self.buckets[-1],
            lora=lora,
            followers=self.followers,
            kind=kind,
        )

    def replay(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run a batch of decodes; its logits [B, vocab] and sampled tokens [B], valid until the next replay.

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
        self._pool = None
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

    def capture_next(self) -> bool:
        """Capture one of those that were left for later; False when there is none."""
        bucket = self._later.next
        if bucket is None:
            return False
        self.capture(bucket)
        return True

    @property
    def due(self) -> bool:
        """Whether one is wanted often that was left for later."""
        return self._later.due is not None

    def capture_due(self) -> None:
        """Capture such a one."""
        if (bucket := self._later.due) is not None:
            self.capture(bucket)

    def only_when_idle(self) -> None:
        """Capture no more of them while there is work: larger ones stand in."""
        self._later.only_when_idle()

    def capture(self, bucket: int) -> _Captured:
        """Capture the step of `bucket` rows."""
        if self.followers is not None:
            self.followers.capture(self.kind, (bucket, 0))
        inputs = PackedInputs([Field(name, kind, bucket) for name, kind in self.fields], self.kv.device)
        inputs.send({name: np.zeros(0, kind) for name, kind in self.fields}, self.padding)
        recording = record(
            self.kv.device,
            lambda: self.step(inputs.view, bucket),
            self._pool,
            lambda: self.step(inputs.view, bucket, *self._short.parts),
        )
        self._pool = self._pool or recording.graph.pool()
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
            query_starts=torch.arange(bucket + 1, dtype=torch.int32, device=rows.device),
            context_lens=view("contexts", torch.int32),
            rows=view("rows", torch.int32),
            block_tables=self.rows.block_tables,
            num_decodes=bucket,
            max_query=1,
            max_context=self.rows.max_context,
        )
        if self._stateful:
            batch.states = state_batch(view)
        if self.lora is not None:
            self.lora.use({name: view(name, torch.int32) for name in TABLES}, bucket)
        hidden = (decoder or self.decoder).forward(ids, batch, watched(kv or self.kv))
        logits = self.decoder.head(hidden)
        if isinstance(self.rows, BlockTables):
            return logits, logits  # rank 0 samples
        temperatures = self.rows.floats[rows, FLOATS.index("temperature")]
        tokens = self.decoder.ops.gumbel_argmax(logits, temperatures, view("keys", torch.int64))
        self.rows.last_tokens[view("stores", torch.int64)] = tokens
        return logits, tokens
