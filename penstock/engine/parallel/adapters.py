"""Adapters on several ranks: each keeps its part, cut like the linears that it adds to.

Matrices cut by outputs have A whole and rows of B, those cut by inputs have columns of A and B whole: such an adapter
is a part of the sum between shards. A stage keeps its own layers. Rank 0's pool decides: the other ranks read an
adapter when it does, in the background; they put it into a slot, or drop it, when it does, in order with the steps. One
that cannot be read on some rank is dropped by all and fails alone.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.engine.adapters.layout import (
    DELTA_DECAYS,
    DELTA_GATES,
    DELTA_MIX,
    DELTA_OUTPUT,
    DELTA_OUTPUT_GATES,
    EMBEDDING,
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    HEAD,
    INDEXER,
    INPUT_GATES,
    LATENT_IN,
    LATENT_KEYS,
    LATENT_OUT,
    LATENT_VALUES,
    ROUTER,
    SHARED,
    SHARED_GATE,
    AdapterCut,
    Rows,
    Site,
)
from penstock.engine.adapters.model_sites import layout_of
from penstock.engine.adapters.peft import LoadedAdapter
from penstock.engine.adapters.runtime import AdaptedModel
from penstock.engine.backends.activation import has_gate
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.parallel.cuts import vocabulary_span
from penstock.engine.parallel.layer_cuts import (
    WHOLE,
    channel_delta_cuts,
    delta_cuts,
    mamba_projection,
    mamba_spans,
    short_conv_cuts,
)
from penstock.engine.parallel.layout import Place, Span, even_span, head_span, kv_head_span, stage_span
from penstock.errors import CheckpointError, PenstockError, ReplicaLost

log = logging.getLogger(__name__)

READ, PUT, DROP = "read_adapter", "put_adapter", "drop_adapter"


def adapter_cut(model: ModelConfig, place: Place, *, experts: bool = True, whole_experts: bool = False) -> AdapterCut:
    """The part of every adapter of `model` that belongs to `place`. `experts`: whether adapters may change them;
    `whole_experts`: whether ranks have those whole, not parts of each."""
    whole = layout_of(model, experts=experts)
    heads, kv_heads = head_span(model, place), kv_head_span(model, place)
    q, kv, width = _times(heads, model.head_dim), _times(kv_heads, model.head_dim), even_span(model.ffn_size, place)
    hidden, q_rows = (0, model.hidden_size), _times(q, 2) if model.gated_attention else q
    parts = 2 if has_gate(model.activation) else 1
    inputs = {"qkv": hidden, "output": q, "output_gate": hidden, "gate_up": hidden, "down": width}
    gates = heads if model.gates_by_head else q
    outputs: dict[str, tuple[Rows, ...]] = {
        "qkv": (q_rows, kv, kv), "output": (hidden,), "output_gate": (gates,),
        "gate_up": (width,) * parts, "down": (hidden,),
    }  # fmt: skip
    moe = model.moe
    if moe is not None:
        # Whole experts, where ranks have whole ones: they may move, and adapters stay.
        shared = (
            even_span(moe.shared_ffn_size, place)
            if moe.shared_ffn_size and not place.data
            else (0, moe.shared_ffn_size)
        )
        expert = (0, moe.ffn_size) if whole_experts else even_span(moe.ffn_size, place)
        outer = (0, moe.latent or model.hidden_size)
        inputs |= {ROUTER: hidden, SHARED_GATE: hidden, EXPERT_GATE_UP: outer, EXPERT_DOWN: expert}
        inputs |= {f"{SHARED}gate_up": hidden, f"{SHARED}down": shared, LATENT_IN: hidden, LATENT_OUT: outer}
        outputs |= {ROUTER: ((0, moe.experts),), SHARED_GATE: ((0, 1),), LATENT_IN: (outer,), LATENT_OUT: (hidden,)}
        outputs |= {EXPERT_GATE_UP: (expert,) * parts, EXPERT_DOWN: (outer,)}
        outputs |= {f"{SHARED}gate_up": (shared,) * parts, f"{SHARED}down": (hidden,)}
    latent = model.latent
    if latent is not None:
        narrow = q if latent.query_rank is None else (0, latent.query_rank)
        inputs |= {"inputs": hidden, "query_up": narrow, "output": _times(heads, latent.value)}
        values = _times(heads, latent.value)
        outputs |= {"inputs": (narrow, (0, latent.rank + latent.rotary)), "query_up": (q,), "output_gate": (values,)}
        if latent.gated_queries:
            inputs["query_up"] = (0, 2 * (latent.query_rank or 0))
            outputs["query_up"] = (_times(heads, model.head_dim + latent.value),)
        inputs[LATENT_VALUES], outputs[LATENT_VALUES] = (0, latent.rank), ((0, latent.value),)
    shape = model.compression
    if shape is not None:
        narrow, (first, last) = (0, shape.query_rank), even_span(shape.output_groups, place)
        inputs |= {
            "inputs": hidden,
            "query_up": narrow,
            "output": (first * shape.output_rank, last * shape.output_rank),
        }
        outputs |= {"inputs": (narrow, (0, model.head_dim)), "query_up": (q,)}
    delta = model.delta
    if delta is not None:
        cuts = channel_delta_cuts(delta, place) if delta.by_channel else delta_cuts(delta, place)
        values, narrow = _times(even_span(delta.v_heads, place), delta.v_dim), (0, delta.k_dim)
        inputs |= {DELTA_MIX: hidden, DELTA_GATES: hidden, DELTA_OUTPUT: values}
        inputs |= {DELTA_DECAYS: narrow, DELTA_OUTPUT_GATES: narrow}
        outputs[DELTA_OUTPUT] = (hidden,)
        for site in whole.sites:
            if site.attribute in (DELTA_MIX, DELTA_GATES, DELTA_DECAYS, DELTA_OUTPUT_GATES):
                outputs[site.attribute] = tuple(
                    cuts.get(module.rpartition(".")[2], WHOLE).outputs or ((0, size),)
                    for module, size in zip(site.modules, site.sizes, strict=True)
                )
    mamba = model.mamba
    if mamba is not None:
        inputs |= {"in_proj": hidden, "out_proj": mamba_spans(mamba, place)[0]}
        outputs |= {"in_proj": (mamba_projection(mamba, place),), "out_proj": (hidden,)}
    if model.short_conv is not None:
        cuts = short_conv_cuts(model.short_conv, place)
        channels, parts_of = cuts["out_proj"].inputs, cuts["in_proj"].outputs
        assert channels is not None and parts_of is not None
        inputs |= {"in_proj": hidden, "out_proj": channels}
        outputs |= {"in_proj": (parts_of,), "out_proj": (hidden,)}
    inputs |= {EMBEDDING: (0, model.vocab_size), HEAD: hidden}
    outputs |= {EMBEDDING: (hidden,), HEAD: (vocabulary_span(model, place),)}
    of_sites: list[tuple[Span, tuple[Rows, ...]]] = []
    for site in whole.sites:
        own = _of_kind(site, model, place)
        of_sites.append((inputs[site.attribute], outputs[site.attribute]) if own is None else own)
    return AdapterCut(
        whole,
        (0, whole.layers) if whole.runs else stage_span(model, place),
        tuple(columns for columns, _ in of_sites),
        tuple(rows for _, rows in of_sites),
        heads,
    )


def _of_kind(site: Site, model: ModelConfig, place: Place) -> tuple[Span, tuple[Rows, ...]] | None:
    """Columns and rows of a site that has others of its name for layers of another kind; None: it has not."""
    hidden, sparse = (0, model.hidden_size), model.sparse_blocks
    if sparse is not None and site.attribute == INDEXER:
        return hidden, (_times(kv_head_span(model, place, sparse.heads), sparse.dim), (0, sparse.dim))
    if "." in site.attribute or site.attribute in INPUT_GATES:
        # What chooses tokens, makes entries of them or gates what layers read is everywhere.
        return (0, site.inputs), tuple((0, size) for size in site.sizes)
    latent = model.latent
    if latent is not None and not latent.uniform and site.attribute == "inputs":
        _, *cached = site.sizes
        return hidden, (_times(head_span(model, place), model.head_dim), *((0, size) for size in cached))
    if latent is not None and site.attribute == LATENT_KEYS:
        return (0, site.inputs), ((0, latent.rank),)
    if model.heads_differ and site.attribute in ("qkv", "output", "output_gate"):
        return _of_heads(site, model, place)
    if model.ffn_sizes and site.attribute == "gate_up":
        return hidden, tuple(even_span(size, place) for size in site.sizes)
    if model.ffn_sizes and site.attribute == "down":
        return even_span(site.inputs, place), (hidden,)
    return None


def _of_heads(site: Site, model: ModelConfig, place: Place) -> tuple[Span, tuple[Rows, ...]]:
    """Of attention in layers that differ in their heads from others."""
    hidden, layer = (0, model.hidden_size), next((layer for layer in range(model.num_layers) if site.is_in(layer)), 0)
    count = model.queries_in(layer)
    heads = head_span(model, place, layer)
    if site.attribute == "output":
        return _times(heads, site.inputs // count), (hidden,)
    queries = _times(heads, site.sizes[0] // count)
    kv_heads = model.heads_in(layer)[0]
    keys = (_times(kv_head_span(model, place, kv_heads), size // kv_heads) for size in site.sizes[1:])
    return hidden, (queries, *keys)


def _times(span: Span, size: int) -> Span:
    return span[0] * size, span[1] * size


@dataclass(frozen=True, slots=True)
class _Known:
    """An adapter that all ranks have read."""

    number: int
    """What the other ranks know it by: a reload of the same name is another adapter."""
    source: str
    folder: str


class Called(Protocol):
    """The other ranks; see `Ranks`."""

    generation: int

    def call(self, name: str, *args: Any) -> list[Future[Any]]: ...

    def await_restart(self, generation: int) -> bool: ...


class _Unreadable(ReplicaLost):
    """A rank that was started again cannot have an adapter that it had."""


class LeadAdapters:
    """Rank 0's side: the other ranks do as it does. See `OtherRanks`."""

    def __init__(self, ranks: Called, model: AdaptedModel, find: Callable[[str], Path]) -> None:
        self._ranks = ranks
        self._model = model
        self._find = find
        self._counter = itertools.count()
        self._lock = threading.Lock()
        """Of what follows: loader threads add to it."""
        self._known: dict[LoadedAdapter, _Known] = {}
        self._undropped: list[int] = []
        """Dropped while not all ranks were there."""
        self._missing: dict[LoadedAdapter, Future[None] | None] = {}
        """What a rank that was started again has not read yet; a future while it does."""
        self.unreadable: dict[LoadedAdapter, ReplicaLost] = {}
        """What it cannot read, because the files have changed or are gone: nobody may use it any more."""

    def read(self, name: str, source: str) -> LoadedAdapter:
        """Read an adapter on all ranks; see `loader.Read`. Runs on a loader thread. Where a rank is lost meanwhile and
        started again, all over again."""
        folder = self._find(source)
        while True:
            generation = self._ranks.generation
            try:
                adapter = self._read(name, source, folder, generation)
            except ReplicaLost:
                if not self._ranks.await_restart(generation):
                    raise
            else:
                if adapter is not None:
                    return adapter

    def _read(self, name: str, source: str, folder: Path, generation: int) -> LoadedAdapter | None:
        """None when a rank has been started again since, which may not have it."""
        number = next(self._counter)
        try:
            answers = self._ranks.call(READ, number, name, source, str(folder))
            try:
                adapter = self._model.read(name, folder)
            finally:
                wait(answers)
            for rank, answer in enumerate(answers, start=1):
                if answer.result() != adapter.version:
                    raise CheckpointError(f"{source} is not the same on rank {rank}, or its files are being replaced")
        except Exception:
            self._forget(number)
            raise
        with self._lock:
            if self._ranks.generation == generation:
                self._known[adapter] = _Known(number, source, str(folder))
                return adapter
        self._forget(number)
        return None

    def put(self, slot: int, adapter: LoadedAdapter) -> None:
        self._have(adapter)
        self._ranks.call(PUT, slot, self._known[adapter].number)

    def drop(self, adapter: LoadedAdapter) -> None:
        with self._lock:
            number = self._known.pop(adapter).number
            self._missing.pop(adapter, None)
            self.unreadable.pop(adapter, None)
        self._forget(number)

    def _forget(self, number: int) -> None:
        try:
            self._ranks.call(DROP, number)
        except ReplicaLost:  # whoever takes the next step notices
            with self._lock:
                self._undropped.append(number)

    def renew(self, placed: dict[LoadedAdapter, int]) -> dict[LoadedAdapter, ReplicaLost]:
        """Ranks that have an adapter answer at once. Waits for the files of those in slots; the others are read behind
        the steps, or when they get a slot before that."""
        with self._lock:
            undropped, self._undropped = self._undropped, []
            self._missing = dict.fromkeys(self._known)
            self.unreadable.clear()
            generation = self._ranks.generation
        for number in undropped:
            self._forget(number)
        unreadable: dict[LoadedAdapter, ReplicaLost] = {}
        for adapter, slot in placed.items():
            try:
                self.put(slot, adapter)
            except _Unreadable as error:
                unreadable[adapter] = error
        if self._missing:
            read = threading.Thread(target=self._read_missing, args=(generation,), name="adapters again", daemon=True)
            read.start()
        return unreadable

    def _read_missing(self, generation: int) -> None:
        while self._ranks.generation == generation:
            with self._lock:
                adapter = next((one for one, begun in self._missing.items() if begun is None), None)
            if adapter is None:
                return
            try:
                self._have(adapter)
            except ReplicaLost as error:  # whoever wants to put it into a slot is told, too
                log.warning("a rank was started again: %s", error)

    def _have(self, adapter: LoadedAdapter) -> None:
        """Return when all ranks have read an adapter, if one of them has lost it."""
        with self._lock:
            missing, known = self._missing, self._known.get(adapter)
            if adapter not in missing or known is None:
                return
            begun, done = missing[adapter], Future[None]()
            if begun is None:
                missing[adapter] = done
        if begun is not None:
            begun.result()
            return
        try:
            self._read_again(adapter, known)
        except BaseException as error:
            if isinstance(error, _Unreadable):
                with self._lock:
                    self.unreadable[adapter] = error
            done.set_exception(error)
            raise
        with self._lock:
            missing.pop(adapter, None)
            dropped = adapter not in self._known
        done.set_result(None)
        if dropped:  # meanwhile, perhaps before the ranks were asked
            self._forget(known.number)

    def _read_again(self, adapter: LoadedAdapter, known: _Known) -> None:
        for answer in self._ranks.call(READ, known.number, adapter.name, known.source, known.folder):
            try:
                version = answer.result()
            except PenstockError as error:
                if isinstance(error, ReplicaLost):
                    raise
                raise _Unreadable(f"the adapter {adapter.name} could not be read again: {error}") from error
            if version != adapter.version:
                raise _Unreadable(f"{known.source} has changed since the adapter {adapter.name} was read")


class FollowingAdapters:
    """The side of any other rank: keeps its parts in host memory, under rank 0's numbers."""

    def __init__(self, model: AdaptedModel, find: Callable[[str], Path] = Path) -> None:
        """`find`: the local folder of a source, where rank 0's folder is not there: on another machine."""
        self._model = model
        self._find = find
        self._adapters: dict[int, LoadedAdapter] = {}
        self._lock = threading.Lock()
        self._reading: set[int] = set()

    def handlers(self) -> dict[str, Callable[..., Any]]:
        return {READ: self.read, PUT: self.put, DROP: self.drop}

    def read(self, number: int, name: str, source: str, folder: str) -> Future[str]:
        """Its version, in the end. Steps go on meanwhile; rank 0 asks for few at a time."""
        done: Future[str] = Future()
        if number in self._adapters:
            done.set_result(self._adapters[number].version)
            return done
        self._reading.add(number)

        def work() -> None:
            try:
                path = Path(folder)
                adapter = self._model.read(name, path if path.is_dir() else self._find(source))
            except Exception as error:  # a bad file fails its adapter, not the rank
                done.set_exception(error)
                return
            with self._lock:
                if number in self._reading:  # or else it was dropped meanwhile
                    self._reading.remove(number)
                    self._adapters[number] = adapter
            done.set_result(adapter.version)

        threading.Thread(target=work, name="adapter loader", daemon=True).start()
        return done

    def put(self, slot: int, number: int) -> None:
        self._model.kernel.put(slot, self._adapters[number])

    def drop(self, number: int) -> None:
        with self._lock:
            self._reading.discard(number)
            self._adapters.pop(number, None)
