"""Runs steps as CUDA graphs: decodes (`decode_graphs`), short prompts (`prompt_graphs`) and chains of drafts
(`draw_chains`); whatever fits none of them is launched kernel by kernel.

At the start it captures what covers all sizes, and the rest in moments without work or beside a long step (`deferred`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.adapters.apply import GraphLora
from penstock.engine.adapters.runtime import is_narrow
from penstock.engine.backends.cuda.capture import GraphPool, Interrupted, interruptible
from penstock.engine.backends.cuda.decode_graphs import DecodeGraphs, Kind
from penstock.engine.backends.cuda.draw_chains import DrawChains
from penstock.engine.backends.cuda.prompt_graphs import PromptGraphs, Shape
from penstock.engine.batch import Batch
from penstock.engine.runner.eager import EagerExecutor
from penstock.engine.runner.follower import BlockTables, Follower, FollowerResources
from penstock.engine.runner.inputs import sampling_chunks
from penstock.engine.runner.resources import RunnerResources
from penstock.engine.runner.rows import DRAWN
from penstock.engine.runner.step import DrawnAhead, PendingStep
from penstock.engine.sequence import Sequence

log = logging.getLogger("penstock.engine")
_CAPTURE_S = 0.02
"""What capturing a step may take; measured from the first one on."""
_SAFE, _SMOOTH = 1.2, 0.3


class GraphExecutor(EagerExecutor):
    """Replays decode steps and short prompt steps; all others are launched kernel by kernel."""

    phase = "graphs"
    prefers_single_tokens = True

    def __init__(self, resources: RunnerResources) -> None:
        super().__init__(resources)
        pool = GraphPool()
        self.graphs = DecodeGraphs(
            resources.decoder.captured(),
            resources.kv,
            resources.rows,
            max_rows=resources.max_rows,
            pool=pool,
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
                pool=pool,
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
        self.altered_graphs: DecodeGraphs | None = None
        """For steps in which some adapter changes single outputs or norms; captured when they occur."""
        self.long_graphs: DecodeGraphs | None = None
        """For steps with longer contexts than those of the others; captured when they occur."""
        if resources.decoder.captured_context is not None:
            self.long_graphs = self.graphs.for_long_contexts()
        adapters = resources.adapters
        if adapters is not None and isinstance(adapters.kernel, GraphLora):
            self.adapted_graphs = self.graphs.with_adapters(adapters.decoder.captured(), adapters.kernel, Kind.ADAPTED)
            if adapters.further is not None:
                further = adapters.further.captured()
                self._expects_experts = any(site.experts for site in adapters.layout.sites)
                self.further_graphs = self.graphs.with_adapters(further, adapters.kernel, Kind.FURTHER)
            if adapters.altered is not None and adapters.model.captures_altered:
                altered = adapters.altered.captured()
                self.altered_graphs = self.graphs.with_adapters(altered, adapters.kernel, Kind.ALTERED)
            if adapters.narrow is not None:
                narrow = adapters.narrow.captured()
                self.narrow_graphs = self.graphs.with_adapters(narrow, adapters.kernel, Kind.NARROW)

    @torch.inference_mode()
    def run(self, batch: Batch) -> PendingStep:
        graphs = self._long_graphs_for(batch) if self._too_long(batch) else self._graphs_for(batch)
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
        most = self._decoder.captured_context
        if most is not None and any(len(seq.tokens) + count > most for seq, count in counts.items()):
            return None
        if any(int(self._rows.flags[seq.row]) & ~DRAWN for seq in counts):
            return None  # sampled from the logits, outside of the graph
        (tokens,), event = self._backend.to_host(self.chains.replay(counts))
        return DrawnAhead(dict(counts), tokens, event)

    def _run_prompts(self, batch: Batch) -> PendingStep:
        packed, adapted = self._inputs.pack(batch), self._begin_adapters(batch)
        launched = adapted or self.prompt_graphs is None or self._too_long(batch)
        shape = None if launched or self.prompt_graphs is None else self.prompt_graphs.shape_of(batch)
        if self.prompt_graphs is None or shape is None:
            return self._launch(batch, packed, adapted or self._decoder)
        step = PendingStep(batch, self._rows, sampling_chunks(batch))
        logits, tokens = self.prompt_graphs.replay(packed, shape)
        if packed.flags & ~DRAWN:
            self._sample(step, logits, self._inputs.sampling_of(batch, packed))
        elif step.chunks:
            (step.tokens,), step.event = self._backend.to_host(tokens)
        return step

    def _too_long(self, batch: Batch) -> bool:
        """Whether some context is longer than those that steps are captured for."""
        most = self._decoder.captured_context
        return most is not None and any(chunk.start + chunk.length > most for chunk in batch.chunks)

    def prepare(self, token_budget: int) -> None:
        for graphs in self._all():
            further = graphs is self.further_graphs and not self._expects_experts
            if not further and graphs not in (self.altered_graphs, self.long_graphs):
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
        with_adapters = self.adapted_graphs, self.narrow_graphs, self.further_graphs, self.altered_graphs
        found = (self.graphs, self.long_graphs, *with_adapters)
        return [graphs for graphs in found if graphs is not None]

    def _long_graphs_for(self, batch: Batch) -> DecodeGraphs | None:
        """The same for a step with a long context."""
        adapted = self._adapters is not None and (
            self._adapters.model.always or any(chunk.slot >= 0 for chunk in batch.chunks)
        )
        if adapted or self.long_graphs is None or not self.graphs.fits(batch):
            return None
        try:
            self.long_graphs.make_ready(batch.num_tokens)
        except RuntimeError as error:  # such as no memory for it
            log.warning("steps with contexts this long are launched from Python: they could not be captured: %s", error)
            self.long_graphs = None
        return self.long_graphs

    def _graphs_for(self, batch: Batch) -> DecodeGraphs | None:
        """The graphs that can run a batch; None when it has to be launched kernel by kernel."""
        if not self.graphs.fits(batch):
            return None
        adapters = self._adapters
        if adapters is None or (not adapters.model.always and all(chunk.slot < 0 for chunk in batch.chunks)):
            return self.graphs
        if adapters.by_host(batch):
            return None
        if adapters.alters(batch):
            return self.altered_graphs
        if self.further_graphs is not None and adapters.touches_further(batch):
            return self.further_graphs
        return self.narrow_graphs if self.narrow_graphs is not None and is_narrow(batch) else self.adapted_graphs


class GraphFollower(Follower):
    """The graphs of a rank that follows rank 0; see `Follower`."""

    def __init__(self, resources: FollowerResources) -> None:
        tables = BlockTables(resources.block_tables, resources.max_context)
        max_rows, pool = resources.max_rows, GraphPool()
        plain = DecodeGraphs(resources.decoder, resources.kv, tables, max_rows=max_rows, pool=pool)
        self.decodes = {Kind.DECODES: plain}
        if resources.decoder.captured_context is not None:
            self.decodes[Kind.LONG] = plain.for_long_contexts()
        self.prompts = PromptGraphs(resources.decoder, resources.kv, tables, max_rows=max_rows, pool=pool)
        if isinstance(resources.lora, GraphLora):
            kinds = (
                (Kind.ADAPTED, resources.adapted),
                (Kind.NARROW, resources.narrow),
                (Kind.FURTHER, resources.further),
                (Kind.ALTERED, resources.altered),
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
