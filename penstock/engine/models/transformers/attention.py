"""The engine's attention as an attention function of the `transformers` library.

A model calls it once or more per layer with the queries, keys and values of a step's packed tokens [1, heads, T, dim].
The order of these calls is the same in every pass, so the n-th call belongs to the n-th layer of the cache. Which
object answers them is a context variable: a `Survey` (`survey`) while a model is loaded, `PagedCalls` in a step.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.host_memory import is_host
from penstock.engine.backends.interface import FP8, AttentionBatch, HeadLayout, KVScales, Ops
from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.kv.cache import KVCache
from penstock.engine.kv.kinds import PagedKV, PagedKVCache

PAGED = "penstock"
SURVEYED = "penstock-survey"
"""Names of the attention functions. The second also receives masks."""
_LARGEST_HEAD = 256
"""Of the CUDA kernels; larger heads are attended to in plain PyTorch there."""


class Calls(Protocol):
    """Answers the attention calls of one pass."""

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """[1, T, heads, value dim]."""
        ...


CALLS: ContextVar[Calls] = ContextVar("calls")


def attention_function(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """What the library calls."""
    return CALLS.get().attend(module, query, key, value, attention_mask, options), None


@dataclass(frozen=True, slots=True)
class HeadPart:
    """The heads of one shard of several."""

    heads: tuple[int, int]
    """Query heads: first and one past the last."""
    kv_heads: tuple[int, int]
    parts: int
    """Into how many the KV heads are divided; shards next to each other have the same part where these are fewer."""
    whole: int
    """Query heads of all shards."""
    whole_kv: int


def head_part(heads: int, kv_heads: int, shard: int, shards: int) -> HeadPart | None:
    """None where so many shards do not divide the heads."""
    parts = shards if kv_heads % shards == 0 else kv_heads
    if heads % shards or heads % kv_heads or shards % parts:
        return None
    part, size, each = shard * parts // shards, kv_heads // parts, heads // shards
    return HeadPart((shard * each, (shard + 1) * each), (part * size, (part + 1) * size), parts, heads, kv_heads)


@dataclass(frozen=True, slots=True)
class Site:
    """One attention call of a pass."""

    module: str
    """Name of the module that calls."""
    heads: HeadLayout
    """As they are cached: keys and values are padded with zeros to one even size, which changes no score."""
    key_dim: int
    value_dim: int
    mine: HeadPart | None = None
    """Where shards divide its heads: which are this one's. `heads` is theirs alone then."""

    @property
    def parts(self) -> int:
        """Into how many parts shards divide its KV heads."""
        return 1 if self.mine is None else self.mine.parts

    def divided(self, mine: HeadPart | None) -> Site:
        """What a shard has of it."""
        if mine is None:
            return self
        (first, last), (kv_first, kv_last) = mine.heads, mine.kv_heads
        heads = replace(self.heads, heads=last - first, kv_heads=kv_last - kv_first)
        return replace(self, heads=heads, mine=mine)

    def cache_kind(self, block_size: int, dtype: torch.dtype) -> PagedKV:
        return PagedKV(self.heads.kv_heads, self.heads.head_dim, block_size, dtype)


def cached_dim(key_dim: int, value_dim: int) -> int:
    """The head size under which keys and values of these sizes are cached."""
    widest = max(key_dim, value_dim)
    return widest + widest % 2


class PagedCalls:
    """Writes keys and values into the paged cache and attends over it, call after call."""

    def __init__(self, sites: list[Site], ops: Ops, device: torch.device) -> None:
        self._sites = sites
        plain = ReferenceOps()
        self._ops = [ops if is_host(device) or s.heads.head_dim <= _LARGEST_HEAD else plain for s in sites]
        dims = {site.heads.head_dim for site in sites}
        # A rotary table of one row that rotates nothing: positions are the library's matter.
        self._unrotated = {
            dim: torch.cat((torch.ones(1, dim // 2), torch.zeros(1, dim // 2)), dim=1).to(device) for dim in dims
        }
        ones = [torch.ones(site.heads.kv_heads, device=device) for site in sites]
        self._fp8_scales: list[KVScales] = [(one, one) for one in ones]
        self._next = 0
        self._batch: AttentionBatch | None = None
        self._stored: AttentionBatch | None = None
        self._caches: list[PagedKVCache] = []

    def begin(self, batch: AttentionBatch, kv: KVCache) -> None:
        """A step's calls follow."""
        self._batch, self._caches, self._next = batch, kv.layers, 0
        self._stored = replace(batch, positions=torch.zeros_like(batch.positions))

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        batch, stored, index = self._batch, self._stored, self._next
        assert batch is not None and stored is not None
        self._next += 1
        site, cache, ops = self._sites[index], self._caches[index], self._ops[index]
        dim = site.heads.head_dim
        tokens, mine = query.shape[2], site.mine
        sinks: Tensor | None = options.get("s_aux")
        if mine is not None:
            query, key, value = query[:, slice(*mine.heads)], *(x[:, slice(*mine.kv_heads)] for x in (key, value))
            sinks = None if sinks is None else sinks[slice(*mine.heads)]
        rows = torch.cat([_padded(x.to(value.dtype), dim) for x in (query, key, value)], dim=1)
        rows = rows[0].transpose(0, 1).reshape(tokens, -1).contiguous()
        scales = self._fp8_scales[index] if cache.k.dtype == FP8 else cache.scales
        q = ops.rope_and_cache(
            rows, site.heads, self._unrotated[dim], stored, cache.k, cache.v, None, None, 0.0, scales
        )
        sinks = None if sinks is None else sinks.float().contiguous()
        out = ops.attention(q, site.heads, batch, cache.k, cache.v, scales, sinks)
        out = out.view(1, tokens, site.heads.heads, dim)[..., : site.value_dim]
        return out if mine is None else F.pad(out, (0, 0, mine.heads[0], mine.whole - mine.heads[1]))


def _padded(x: Tensor, dim: int) -> Tensor:
    return x if x.shape[-1] == dim else F.pad(x, (0, dim - x.shape[-1]))
