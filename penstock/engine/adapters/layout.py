"""Where adapters add to a decoder, and how one adapter's matrices lie in memory.

An adapter of rank r adds B(A x) to a linear: A is [r, inputs], B is [outputs, r]. Linears that the decoder fuses
(query, key and value; gate and up) keep one A and B per part. All matrices of an adapter are one flat buffer, so that
bringing it to the device is one copy:

    for each layer, for each site:   A [parts * r, inputs]   B transposed [r, outputs]     (B holds alpha / r already)

A site of experts has these two for every expert of the layer. Such sites lie behind all others, so that an adapter that
does not touch them ends before them; before these lie embedding and head, which no layer has. Everything is
proportional to r: a site begins at r times its `start`, and adapters of different rank need no padding. On CUDA B stays
[outputs, r], and r is filled up with zeros to a multiple of 8: what one output needs of B is then one aligned read, and
a program that computes a single output wastes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ROUTER, EXPERT_GATE_UP, EXPERT_DOWN = "router", "expert_gate_up", "expert_down"
SHARED, SHARED_GATE = "shared_", "shared_gate"
LATENT_IN, LATENT_OUT = "latent_in", "latent_out"
"""Attributes of sites of a mixture of experts: `adapters.experts` knows where they are."""
LATENT_KEYS, LATENT_VALUES = "latent_keys", "latent_values"
"""Attributes of sites of heads: `adapters.latent` knows where they are."""
EMBEDDING, HEAD = "embedding", "lm_head"
"""Attributes of what no layer has: `adapters.ends` knows where they are."""
ANY = "#"
"""Stands for the number of an expert in the names of modules."""
DELTA_MIX, DELTA_GATES, DELTA_OUTPUT = "delta_mix", "delta_gates", "delta_output"
DELTA_DECAYS, DELTA_OUTPUT_GATES = "decay_expand", "gate_expand"
"""Attributes of sites of delta nets: `adapters.delta_nets` knows where they are."""
MIXER_GATE_IN, MIXER_GATE_OUT = "mixer_gate_in", "mixer_gate_out"
EXPERTS_GATE_IN, EXPERTS_GATE_OUT = "experts_gate_in", "experts_gate_out"
INDEXER = "indexer.linear"
"""Attribute of what chooses blocks of the context by the keys of their tokens."""
INPUT_GATES = (MIXER_GATE_IN, MIXER_GATE_OUT, EXPERTS_GATE_IN, EXPERTS_GATE_OUT)
"""Attributes of sites of gates behind norms: `adapters.input_gates` knows where they are."""
LAYER = r"((?:.*\.)?)(?:layers|h|blocks)\.(\d+)\."
"""How the path of what is in a layer begins; see `AdapterLayout.numbered`."""
_WIDE = 8
"""Elements of two bytes in the widest load of a thread."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A parameter with one matrix for every expert of a layer."""

    paths: tuple[str, ...]
    """What it may be called below the layer: that has changed between releases of transformers."""
    interleaved: bool = False
    """Whether outputs of its two parts alternate."""
    reversed: bool = False
    """Whether PEFT takes its inputs for outputs, which it does where a matrix is stored transposed and does not say."""


@dataclass(frozen=True, slots=True)
class Site:
    """A linear of every decoder layer that adapters may add to."""

    attribute: str
    """Its name in the layer's mixer or `GatedMlp`; with dots, in a part of the mixer."""
    modules: tuple[str, ...]
    """Checkpoint modules stacked in it, below the layer."""
    sizes: tuple[int, ...]
    """Outputs of each module."""
    inputs: int
    fused: str = ""
    """The module's name in checkpoints that fuse the parts as we do."""
    aliases: tuple[str, ...] = ()
    """Other names of the module, where it has one part."""
    of_attention: bool = False
    """Whether only layers with attention have it; see `adapt`."""
    of_recurrent: bool = False
    """Whether only layers without attention have it."""
    layers: tuple[bool, ...] | None = None
    """Which layers have it; None: all."""
    further: bool = False
    """Whether few adapters touch it (experts, routers, delta nets): steps without such adapters run a decoder in which
    it is the ordinary linear."""
    experts: int = 0
    """Above 0: the linears of this many experts, each with matrices of its own."""
    heads: Literal["", "keys", "values"] = ""
    """Of what makes keys and values of latents: one of the two, with a head where others have an expert. See
    `adapters.latent`."""
    stack: Stack | None = None
    """Of experts: the parameter that holds this linear of all of them, as PEFT sees it."""
    end: Literal["", "embedding", "head"] = ""
    """Of what stands before or behind all layers: one of the two. See `adapters.ends`."""
    factor: float = 1.0
    """What the model's own matrix was multiplied by when it was loaded."""
    norm_eps: float | None = None
    """Of the embedding: epsilon of the norm that its rows got when they were loaded; None: they got none."""
    virtual_factor: float | None = 1.0
    """Of the embedding: what rows are multiplied by that stand for no token; None: there can be none."""
    closed: bool = False
    """Of embedding and head: whether the model looks tokens up in other tables too, so that there can be no others."""
    gated: bool = False
    """Whether what its last part gives, times what the others give, is all that the next site reads."""

    @property
    def outputs(self) -> int:
        return sum(self.sizes)

    @property
    def each(self) -> int:
        """Elements per rank of one linear: A of every part, and B."""
        return len(self.sizes) * self.inputs + self.outputs

    @property
    def unit(self) -> int:
        """Elements per rank in a layer."""
        return self.each * max(1, self.experts)

    def is_in(self, layer: int) -> bool:
        return self.layers is None or self.layers[layer]


@dataclass(frozen=True, slots=True)
class PlacedSite:
    """One site of one layer, with its place in an adapter's buffer."""

    site: Site
    layer: int
    index: int
    """Which site of its layer."""
    start: int
    """Times the rank: first element of A; B follows A."""
    column: int = 0
    """Of its first output, where an adapter has one number for every output; see `adapters.vectors`."""


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """All sites of a model, in buffer order."""

    sites: tuple[Site, ...]
    layers: int
    by_output: bool = False
    """B is [outputs, r] and r a multiple of `_WIDE`; else B is transposed."""
    ends: bool = True
    """Whether it has room for embedding and head: stages behind the first have neither."""
    tied: bool = False
    """Whether the head is the embedding."""
    virtual_only: bool = False
    """Whether its embedding takes virtual tokens and no other adapters."""
    stacks: tuple[str, ...] = ()
    """What layers are below where there are several stacks of them, of equal height, which `layers` counts one after
    another."""
    runs: tuple[int, ...] = ()
    """Where layers run several times for each token: the layer of each run."""

    @property
    def cached_layers(self) -> int:
        """Those that have keys and values, which every run of a layer has."""
        return len(self.runs) or self.layers

    def numbered(self, before: str, number: str) -> int:
        """Which layer of all has this number in its path, behind `before`; one that there is not is beyond the last."""
        if not self.stacks:
            return int(number)
        height, stack = self.layers // len(self.stacks), before.removesuffix(".").rpartition(".")[2]
        known = stack in self.stacks and int(number) < height
        return self.stacks.index(stack) * height + int(number) if known else self.layers

    def number_in_path(self, layer: int) -> int:
        return layer % (self.layers // len(self.stacks)) if self.stacks else layer

    def width(self, rank: int) -> int:
        """The r that an adapter of this rank is stored with."""
        return -(-rank // _WIDE) * _WIDE if self.by_output else rank

    def up(self, flat: Tensor, width: int, outputs: int) -> Tensor:
        """B of a site as [r, outputs], whatever lies in memory: a view."""
        return flat.view(outputs, width).t() if self.by_output else flat.view(width, outputs)

    @property
    def shared_unit(self) -> int:
        """Elements per rank of an adapter that touches no expert, embedding or head."""
        return sum(self._units(layer, experts=False) for layer in range(self.layers))

    @property
    def unit_to_ends(self) -> int:
        """The same of one that touches no expert."""
        return self.shared_unit + self._units_of_ends(len(self.sites))

    @property
    def unit(self) -> int:
        """Elements of an adapter per rank."""
        return self.unit_to_ends + sum(self._units(layer, experts=True) for layer in range(self.layers))

    @property
    def columns(self) -> int:
        """Outputs of all sites, those of experts aside."""
        ends = sum(site.outputs for site in self.sites if site.end) if self.ends else 0
        return ends + sum(self._outputs(layer) for layer in range(self.layers))

    def place(self, layer: int, index: int) -> PlacedSite:
        """`layer`: 0 for embedding and head."""
        site = self.sites[index]
        if site.end:
            column = sum(self._outputs(before) for before in range(self.layers))
            column += sum(one.outputs for one in self.sites[:index] if one.end)
            return PlacedSite(site, layer, index, self.shared_unit + self._units_of_ends(index), column)
        experts = bool(site.experts)
        start = self.unit_to_ends if experts else 0
        start += sum(self._units(before, experts) for before in range(layer))
        start += self._units(layer, experts, self.sites[:index])
        column = sum(self._outputs(before) for before in range(layer)) + self._outputs(layer, self.sites[:index])
        return PlacedSite(site, layer, index, start, column)

    def touches_further(self, ranks: Tensor) -> bool:
        """Whether an adapter with these ranks of the sites touches one that few do."""
        return any(site.further and rank for site, rank in zip(self.sites, ranks.tolist(), strict=True))

    def _units(self, layer: int, experts: bool, sites: tuple[Site, ...] | None = None) -> int:
        every = self.sites if sites is None else sites
        return sum(site.unit for site in every if not site.end and bool(site.experts) is experts and site.is_in(layer))

    def _outputs(self, layer: int, sites: tuple[Site, ...] | None = None) -> int:
        every = self.sites if sites is None else sites
        return sum(site.outputs for site in every if not site.end and not site.experts and site.is_in(layer))

    def _units_of_ends(self, index: int) -> int:
        """Of those before a site."""
        return sum(site.unit for site in self.sites[:index] if site.end) if self.ends else 0


Span = tuple[int, int]
"""First and one past the last."""
Rows = Span | tuple[Span, ...]
"""Some rows of a matrix: a run of them, or several."""


def rows_of(matrix: Tensor, rows: Rows) -> Tensor:
    if isinstance(rows[0], tuple):
        return torch.cat([rows_of(matrix, each) for each in rows if isinstance(each, tuple)])
    first, last = rows
    assert isinstance(last, int)
    return matrix[first:last]


@dataclass(frozen=True, slots=True)
class AdapterCut:
    """The part of every adapter that one process keeps: cut like the linears that it adds to."""

    whole: AdapterLayout
    layers: Span
    inputs: tuple[Span, ...]
    """Of each site: columns of A."""
    outputs: tuple[tuple[Rows, ...], ...]
    """Of each site and each of its parts: rows of B."""
    heads: Span = (0, 0)
    """Of sites of heads, which."""

    @property
    def cached_layers(self) -> Span:
        return (0, len(self.whole.runs)) if self.whole.runs else self.layers


def uncut(layout: AdapterLayout) -> AdapterCut:
    """All of every adapter: what an engine on one device keeps."""
    inputs = tuple((0, site.inputs) for site in layout.sites)
    outputs = tuple(tuple((0, size) for size in site.sizes) for site in layout.sites)
    heads = max((site.experts for site in layout.sites if site.heads), default=0)
    return AdapterCut(layout, (0, layout.layers), inputs, outputs, (0, heads))
