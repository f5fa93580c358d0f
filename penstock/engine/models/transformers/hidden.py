"""Ways to compute the hidden states of a step's packed tokens with a model of the `transformers` library.

`PackedPass`: all tokens in one row, through the engine's attention (`attention`). `SequencePass`: for models that have
attention of their own (position biases, local patterns): one sequence after the other, each with its earlier keys
and values gathered from the paged cache. `StatefulPass` (`stateful`): the same for models whose layers keep states.
`TokenPass`: in deterministic mode, every token by itself. What PyTorch gives for a row depends on how many there are
(vector loops have ends, reductions are cut by their number), and the library's code may call anything; alone, a token
is always computed alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.backends.interface import FP8, AttentionBatch, KVScales
from penstock.engine.backends.reference.ops import CachedBlocks, store
from penstock.engine.kv.cache import KVCache
from penstock.engine.kv.kinds import StateTensors
from penstock.engine.models.transformers.attention import CALLS, PagedCalls, Site
from penstock.engine.models.transformers.body import Body


class HiddenStates(Protocol):
    """The layers of a model between tokens and head."""

    sites: list[Site]
    states: StateTensors | None
    """What is kept of a sequence beside keys and values: the last entry of the cache."""

    def __call__(self, entry: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        """[T, hidden] of what a pass begins with (see `Body`); `kv` knows the tokens afterwards."""
        ...


Part = Callable[[int, int], None]
"""Called with the first and one past the last of the packed tokens that are computed next."""


class PackedPass:
    """See `HiddenStates`."""

    states: StateTensors | None = None

    def __init__(self, body: Body, sites: list[Site], calls: PagedCalls) -> None:
        self.sites = sites
        self._body = body
        self._calls = calls

    def __call__(self, entry: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        self._calls.begin(batch, kv)
        token = CALLS.set(self._calls)
        try:
            return self._body(entry, position_ids=batch.positions.unsqueeze(0), use_cache=False)
        finally:
            CALLS.reset(token)


class TokenPass:
    """See `HiddenStates`. Where tokens read others of the same step, those have smaller positions."""

    before: Part | None = None
    states: StateTensors | None = None

    def __init__(self, packed: PackedPass) -> None:
        self.sites = packed.sites
        self._packed = packed

    def __call__(self, entry: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        starts, contexts, rows = (x.tolist() for x in (batch.query_starts, batch.context_lens, batch.rows))
        tokens = [
            (context - end + index + 1, index, row)
            for begin, end, context, row in zip(starts, starts[1:], contexts, rows, strict=False)
            for index in range(begin, end)
        ]
        one = torch.tensor([0, 1], dtype=batch.query_starts.dtype, device=batch.query_starts.device)
        parts: list[Tensor] = [entry] * len(tokens)
        for context, index, row in sorted(tokens):
            if self.before is not None:
                self.before(index, index + 1)
            alone = replace(
                batch,
                positions=batch.positions[index : index + 1],
                slots=batch.slots[index : index + 1],
                query_starts=one,
                context_lens=batch.context_lens.new_tensor([context]),
                rows=batch.rows.new_tensor([row]),
                num_decodes=1,
                max_query=1,
                max_context=context,
            )
            parts[index] = self._packed(entry[index : index + 1], alone, kv)
        return torch.cat(parts)


class SequencePass:
    """See `HiddenStates`."""

    before: Part | None = None
    states: StateTensors | None = None

    def __init__(
        self,
        body: Body,
        sites: list[Site],
        positions: bool,
        dtype: torch.dtype,
        device: torch.device,
        before: int = 0,
    ) -> None:
        """`positions`: whether the model is told them. `before`: layers of other stages before these."""
        self.sites = sites
        self._body = body
        self._positions = positions
        self._before = before
        self._dtype = dtype
        self._ones = [torch.ones(site.heads.kv_heads, device=device) for site in sites]

    def __call__(self, entry: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        starts, contexts, rows = (x.tolist() for x in (batch.query_starts, batch.context_lens, batch.rows))
        spans = list(zip(starts, starts[1:], contexts, rows, strict=False))
        parts: list[Tensor] = [entry] * len(spans)
        # One may begin behind a prefix that another computes in the same step: that other one begins before.
        for index in sorted(range(len(spans)), key=lambda i: spans[i][2] - spans[i][1] + spans[i][0]):
            begin, end, context, row = spans[index]
            if self.before is not None:
                self.before(begin, end)
            earlier = context - (end - begin)
            keys_values = self._gathered(earlier, batch.block_tables[row], kv) if earlier else []
            cache = self._cache(earlier, keys_values, entry.device)
            options: dict[str, Any] = {}
            if self._positions:
                options["position_ids"] = batch.positions[begin:end].unsqueeze(0)
            parts[index] = self._body(entry[begin:end], past_key_values=cache, use_cache=True, **options)
            found = [(layer.keys, layer.values) for layer in cache.layers[self._before :]]
            self._keep(found, batch.slots[begin:end], kv)
        return torch.cat(parts)

    def _scales(self, index: int, layer: Any) -> KVScales | None:
        if layer.k.dtype == FP8:
            return self._ones[index], self._ones[index]
        scales: KVScales | None = layer.scales
        return scales

    def _gathered(self, length: int, table: Tensor, kv: KVCache) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [1, heads, length, dim] of the first tokens of a sequence, by site."""
        found = []
        blocks = table[: -(-length // kv.block_size)]
        for index, (site, cache) in enumerate(zip(self.sites, kv.layers, strict=False)):
            scales = self._scales(index, cache) or (None, None)
            k = CachedBlocks(cache.k, scales[0], self._dtype).gather(blocks)[None, :, :length, : site.key_dim]
            v = CachedBlocks(cache.v, scales[1], self._dtype).gather(blocks)[None, :, :length, : site.value_dim]
            found.append((_among_all(k, site), _among_all(v, site)))
        return found

    def _cache(self, length: int, keys_values: list[tuple[Tensor, Tensor]], device: torch.device) -> Any:
        """The cache of a sequence as the library has it."""
        library: Any = import_module("transformers.cache_utils")
        # Models read off the first layer how many tokens there were.
        layers: list[Any] = [of_length(library, length, device) for _ in range(self._before)]
        for k, v in keys_values:
            layer = library.DynamicLayer()
            layer.lazy_initialization(k, v)
            layer.keys, layer.values = k, v
            layers.append(layer)
        layers += [library.DynamicLayer() for _ in range(len(self.sites) - len(keys_values))]
        return library.Cache(layers=layers)

    def _keep(self, found: Iterable[tuple[Tensor, Tensor]], slots: Tensor, kv: KVCache) -> None:
        """Write the new tokens of a sequence into its blocks. `found`: keys and values of all its tokens, by site."""
        new = len(slots)
        block, offset = slots // kv.block_size, slots % kv.block_size
        for index, (both, paged) in enumerate(zip(found, kv.layers, strict=False)):
            scales = self._scales(index, paged) or (None, None)
            for x, into, scale in zip(both, (paged.k, paged.v), scales, strict=True):
                mine = self.sites[index].mine
                heads = slice(None) if mine is None else slice(*mine.kv_heads)
                rows = x[0, heads, -new:].transpose(0, 1)
                rows = torch.nn.functional.pad(rows, (0, into.shape[-1] - rows.shape[-1]))
                store(rows, into, scale, block, offset)


def _among_all(x: Tensor, site: Site) -> Tensor:
    """A shard's keys or values in their places among those of all heads; what the others are makes no difference to its
    part."""
    mine = site.mine
    if mine is None:
        return x
    first, last = mine.kv_heads
    return torch.nn.functional.pad(x, (0, 0, 0, 0, first, mine.whole_kv - last))


def of_length(library: Any, length: int, device: torch.device) -> Any:
    """The cache of a layer in another stage: of it only the length is known."""
    layer = library.DynamicLayer()
    if length:
        nothing = torch.empty(1, 1, length, 1, device=device)
        layer.lazy_initialization(nothing, nothing)
        layer.keys = layer.values = nothing
    return layer
