"""Where adapters add to a decoder, and how one adapter's matrices lie in memory.

An adapter of rank r adds B(A x) to a linear: A is [r, inputs], B is [outputs, r]. Linears that the decoder fuses
(query, key and value; gate and up) keep one A and B per part. All matrices of an adapter are one flat buffer, so that
bringing it to the device is one copy:

    for each layer, for each site:   A [parts * r, inputs]   B transposed [r, outputs]     (B holds alpha / r already)

Everything is proportional to r: a site begins at r times its `start`, and adapters of different rank need no padding.
On CUDA B stays [outputs, r], and r is filled up with zeros to a multiple of 8: what one output needs of B is then one
aligned read, and a program that computes a single output wastes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.models.families import family_of
from penstock.engine.models.model_config import ModelConfig

_WIDE = 8
"""Elements of two bytes in the widest load of a thread."""


@dataclass(frozen=True, slots=True)
class Site:
    """A linear of every decoder layer that adapters may add to."""

    attribute: str
    """Its name in the layer's `Attention` or `GatedMlp`."""
    modules: tuple[str, ...]
    """Checkpoint modules stacked in it, below the layer."""
    sizes: tuple[int, ...]
    """Outputs of each module."""
    inputs: int
    fused: str = ""
    """The module's name in checkpoints that fuse the parts as we do."""
    of_attention: bool = False
    """Whether only layers with attention have it; see `adapt`."""
    of_recurrent: bool = False
    """Whether only layers without attention have it."""

    @property
    def outputs(self) -> int:
        return sum(self.sizes)

    @property
    def unit(self) -> int:
        """Elements per rank: A of every part, and B."""
        return len(self.sizes) * self.inputs + self.outputs


@dataclass(frozen=True, slots=True)
class PlacedSite:
    """One site of one layer, with its place in an adapter's buffer."""

    site: Site
    layer: int
    index: int
    """Which site of its layer."""
    start: int
    """Times the rank: first element of A; B follows A."""


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """All sites of a model, in buffer order."""

    sites: tuple[Site, ...]
    layers: int
    by_output: bool = False
    """B is [outputs, r] and r a multiple of `_WIDE`; else B is transposed."""

    def width(self, rank: int) -> int:
        """The r that an adapter of this rank is stored with."""
        return -(-rank // _WIDE) * _WIDE if self.by_output else rank

    def up(self, flat: Tensor, width: int, outputs: int) -> Tensor:
        """B of a site as [r, outputs], whatever lies in memory: a view."""
        return flat.view(outputs, width).t() if self.by_output else flat.view(width, outputs)

    @property
    def layer_unit(self) -> int:
        return sum(site.unit for site in self.sites)

    @property
    def unit(self) -> int:
        """Elements of an adapter per rank."""
        return self.layers * self.layer_unit

    def place(self, layer: int, index: int) -> PlacedSite:
        before = sum(site.unit for site in self.sites[:index])
        return PlacedSite(self.sites[index], layer, index, layer * self.layer_unit + before)


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


def uncut(layout: AdapterLayout) -> AdapterCut:
    """All of every adapter: what an engine on one device keeps."""
    inputs = tuple((0, site.inputs) for site in layout.sites)
    outputs = tuple(tuple((0, size) for size in site.sizes) for site in layout.sites)
    return AdapterCut(layout, (0, layout.layers), inputs, outputs)


def layout_of(config: ModelConfig, *, by_output: bool = False) -> AdapterLayout:
    """Attention and feed-forward linears; where there are experts or latents, those of attention only. What makes
    keys and values of latents has none: it is not applied as a linear. Delta nets have none either."""
    hidden, ffn = config.hidden_size, config.ffn_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    names = family_of(config.family).names
    latent = config.latent
    if latent is not None:
        at, narrow = names.attention, latent.query_rank
        first, size = ("q_proj", q_size) if narrow is None else ("q_a_proj", narrow)
        made = (f"{at}{first}", f"{at}kv_a_proj_with_mqa"), (size, latent.rank + latent.rotary)
        up = () if narrow is None else (Site("query_up", (f"{at}q_b_proj",), (q_size,), narrow),)
        output = Site("output", (at + names.output,), (hidden,), config.num_heads * latent.value)
        return AdapterLayout((Site("inputs", *made, hidden), *up, output), config.num_layers, by_output)
    qkv = tuple(names.attention + part for part in names.qkv)
    q_rows = 2 * q_size if config.gated_attention else q_size
    attention: tuple[Site, ...] = (
        Site("qkv", qkv, (q_rows, kv_size, kv_size), hidden, names.attention + names.fused_qkv, of_attention=True),
        Site("output", (names.attention + names.output,), (hidden,), q_size, of_attention=True),
    )
    mamba = config.mamba
    if mamba is not None:
        width = mamba.inner + mamba.channels + mamba.heads
        attention = (
            *attention,
            Site("in_proj", (f"{names.mamba}in_proj",), (width,), hidden, of_recurrent=True),
            Site("out_proj", (f"{names.mamba}out_proj",), (hidden,), mamba.inner, of_recurrent=True),
        )
    if config.moe is not None:
        return AdapterLayout(attention, config.num_layers, by_output)
    gate_up = tuple(names.mlp + part for part in names.gate_up)
    feed_forward = (
        Site("gate_up", gate_up, (ffn, ffn), hidden, names.mlp + names.fused_gate_up),
        Site("down", (names.mlp + names.down,), (hidden,), ffn),
    )
    return AdapterLayout((*attention, *feed_forward), config.num_layers, by_output)
