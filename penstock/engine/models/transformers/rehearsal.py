"""Runs the layers of a model with one shard's part of them, before anything is cut.

A whole pass is noted: what every linear was called with, what layers gave, the keys and values of attention. In the
next pass linears that a shard has some rows of give zeros for the others, and heads of others are left out. Whatever
the shard computes for itself must be what it was; then it is replaced by that, so that a fault shows in its own layer.
Such a layer keeps its attention whole, and if that does not help, all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.models.transformers.attention import CALLS, PAGED, HeadPart, head_part
from penstock.engine.models.transformers.body import Body, CannotDivide
from penstock.engine.models.transformers.dependencies import LayerCuts, stream_in
from penstock.engine.models.transformers.interface import register, use
from penstock.engine.models.transformers.linears import linears_of
from penstock.engine.models.transformers.survey import TOKENS

Kept = tuple[Tensor, ...]
"""Queries (with the engine's attention), keys and values of one call, all heads."""


@dataclass(slots=True)
class SettledLayer:
    """What is cut of a layer, by the names below it."""

    rows: dict[str, Tensor] = field(default_factory=dict)
    columns: dict[str, nn.Module] = field(default_factory=dict)


@dataclass(slots=True)
class Settled:
    """What all shards can run as parts."""

    layers: dict[int, SettledLayer]
    heads: dict[int, HeadPart]
    """By attention call (`paged`), or by layer of the cache from the first of this stage."""
    paged: bool


def settle(
    body: Body,
    layers: dict[int, nn.Module],
    found: dict[int, LayerCuts],
    shard: int,
    shards: int,
    any_of: Callable[[list[bool]], list[bool]],
    close: float,
    *,
    paged: bool,
) -> Settled:
    """`layers`: those of this stage. `found`: how each might be cut. `any_of`: which flags some shard has set; all
    shards call this together. `close`: how far two passes may be apart. `paged`: with the engine's attention, if that
    is possible."""
    rehearsal = _Rehearsal(body, layers, found, shard, shards, close)
    paged = paged and rehearsal.note(paged=True)
    if any_of([not paged])[0]:
        paged = False
        if any_of([not rehearsal.note(paged=False)])[0]:
            return Settled({}, {}, paged)
    order = sorted(layers)
    while True:
        ends = rehearsal.run(paged)
        *faults, broken = any_of([*(index in rehearsal.faults for index in order), not ends])
        if broken:
            return Settled({}, {}, paged)
        if not any(faults):
            return rehearsal.settled(paged)
        for index, faulty in zip(order, faults, strict=True):
            if faulty and not rehearsal.level[index]:  # not for its cuts: nothing here can be relied on
                return Settled({}, {}, paged)
            rehearsal.level[index] -= int(faulty)


class _Rehearsal:
    """See above."""

    def __init__(
        self,
        body: Body,
        layers: dict[int, nn.Module],
        found: dict[int, LayerCuts],
        shard: int,
        shards: int,
        close: float,
    ) -> None:
        self._body = body
        self._layers = layers
        self._found = found
        self._shard, self._shards = shard, shards
        self._close = close
        self.level = {index: 2 if index in found else 0 for index in layers}
        """2: attention and the rest are divided. 1: the rest is. 0: nothing."""
        self.faults: set[int] = set()
        self._linears = {index: dict(linears_of(layer)) for index, layer in layers.items()}
        self._of_module = {module: index for index, layer in layers.items() for module in layer.modules()}
        self._inputs: dict[nn.Module, list[Tensor]] = {}
        self._outputs: dict[int, Any] = {}
        self._kept: list[tuple[int, Kept]] = []
        """By attention call, or layer of the cache: the layer, and what was attended to."""
        self._attending: dict[int, tuple[set[str], set[str]]] = {}
        """By layer: the linears that were called before and behind attention."""

    def note(self, *, paged: bool) -> bool:
        """Run the whole; False where that is not possible this way."""
        self._inputs, self._outputs, self._kept, self._attending = {}, {}, [], {}
        called: dict[int, list[str]] = {index: [] for index in self._layers}
        with ExitStack() as stack:
            for index, linears in self._linears.items():
                for name, module in linears.items():

                    def before(module: nn.Module, given: Any, index: int = index, name: str = name) -> None:
                        self._inputs.setdefault(module, []).append(given[0].clone())
                        called[index].append(name)

                    stack.callback(module.register_forward_pre_hook(before).remove)

            def behind(layer: nn.Module, _: Any, out: Any) -> None:
                self._outputs[self._of_module[layer]] = out

            for layer in self._layers.values():
                stack.callback(layer.register_forward_hook(behind).remove)

            def attended(index: int, kept: Kept) -> None:
                self._kept.append((index, kept))
                self._attending.setdefault(index, (set(called[index]), set()))

            try:
                self._pass(paged, attended, lambda call, index, out: out)
            except (KeyboardInterrupt, MemoryError, CannotDivide):
                raise
            except Exception:
                return False
        for index, (first, rest) in self._attending.items():
            rest |= set(called[index]) - first
        return bool(self._kept)

    def run(self, paged: bool) -> bool:
        """Run the part; `faults` has the layers in which it is not that of the whole. False where it does not run."""
        self.faults = set()
        inputs = {module: iter(noted) for module, noted in self._inputs.items()}
        with ExitStack() as stack:
            for index, linears in self._linears.items():
                cut = self._cut(index)
                for name, module in linears.items():

                    def before(module: nn.Module, given: Any, index: int = index, name: str = name) -> Any:
                        expected = next(inputs[module], None)
                        if expected is None:
                            self.faults.add(index)
                            return None
                        here = slice(None)
                        if name in self._cut(index).columns:
                            size = expected.shape[-1] // self._shards
                            here = slice(self._shard * size, (self._shard + 1) * size)
                        self._compare(index, given[0][..., here], expected[..., here])
                        return (expected, *given[1:])

                    stack.callback(module.register_forward_pre_hook(before).remove)
                    if name in cut.rows:
                        needed = cut.rows[name][:, self._shard]

                        def mask(_: Any, __: Any, out: Tensor, needed: Tensor = needed) -> Tensor:
                            return out * needed.to(out.dtype)

                        stack.callback(module.register_forward_hook(mask).remove)

            def behind(layer: nn.Module, _: Any, out: Any) -> Any:
                index = self._of_module[layer]
                expected = self._outputs[index]
                self._compare(index, stream_in(out), stream_in(expected))
                return expected

            for layer in self._layers.values():
                stack.callback(layer.register_forward_hook(behind).remove)
            call = 0

            def attended(index: int, kept: Kept) -> None:
                nonlocal call
                _, whole = self._kept[call]
                part = self._heads(call)
                for at, (a, b) in enumerate(zip(kept, whole, strict=True)):
                    here = slice(None)
                    if part is not None:
                        here = slice(*(part.heads if paged and at == 0 else part.kv_heads))
                    self._compare(index, a[:, here], b[:, here])
                call += 1

            def without(call: int, index: int, out: Tensor) -> Tensor:
                part = self._heads(call)
                if part is None:
                    return out
                mine, here = torch.zeros_like(out), slice(*(part.heads if paged else part.kv_heads))
                mine[:, :, here] = out[:, :, here]
                return mine

            try:
                self._pass(paged, attended, without)
            except (KeyboardInterrupt, MemoryError, CannotDivide):
                raise
            except Exception:  # whatever a model does when values are zero that never were
                return False
        return True

    def settled(self, paged: bool) -> Settled:
        layers = {}
        for index in self._layers:
            cut, linears = self._cut(index), self._linears[index]
            if cut.columns:
                layers[index] = SettledLayer(cut.rows, {name: linears[name] for name in cut.columns})
        parts = {call: part for call in range(len(self._kept)) if (part := self._heads(call)) is not None}
        return Settled(layers, parts, paged)

    def _cut(self, index: int) -> LayerCuts:
        """What is cut of a layer now."""
        found, level = self._found.get(index), self.level[index]
        if found is None or not level:
            return LayerCuts({}, ())
        divisible = all(self._part(kept) is not None for at, kept in self._kept if at == index)
        if level == 2 and divisible:
            return found
        # Groups of linears that feed each other across attention are whole then.
        rows, columns = dict(found.rows), set(found.columns)
        across = self._across(index, found)
        while across:
            columns -= {target for name in across for target in found.columns_of(name)}
            rows = {name: needed for name, needed in rows.items() if name not in across}
            across = {name for name in rows if not found.columns_of(name) <= columns}
        fed = {target for name in rows for target in found.columns_of(name)}
        return LayerCuts(rows, tuple(sorted(columns & fed)), found.targets)

    def _across(self, index: int, cut: LayerCuts) -> set[str]:
        """The linears cut by outputs that reach others by way of attention."""
        first, behind = self._attending.get(index, (set(), set()))
        return {name for name in cut.rows if name in first and cut.columns_of(name) & behind}

    def _heads(self, call: int) -> HeadPart | None:
        """Which heads the shard has in an attention call; None where all."""
        index, kept = self._kept[call]
        if not self._across(index, self._cut(index)):
            return None
        return self._part(kept)

    def _part(self, kept: Kept) -> HeadPart | None:
        kv_heads = kept[-1].shape[1]
        if len(kept) == 3:
            return head_part(kept[0].shape[1], kv_heads, self._shard, self._shards)
        # In a cache there are no queries to be seen: what is attended to is all that is divided here.
        part = head_part(kv_heads * self._shards, kv_heads, self._shard, self._shards)
        return None if part is None else replace(part, heads=part.kv_heads, whole=kv_heads)

    def _compare(self, index: int, a: Tensor, b: Tensor) -> None:
        if a.shape != b.shape or not float((a - b).norm()) <= self._close * float(b.norm()) + 1e-6:
            self.faults.add(index)

    def _pass(
        self, paged: bool, attended: Callable[[int, Kept], None], change: Callable[[int, int, Tensor], Tensor]
    ) -> None:
        """Of a few tokens. `attended` is told of each attention call or layer of the cache; `change` may change what
        attention gives, or what is cached, by heads."""
        body, cpu = self._body, torch.device("cpu")
        entry = body.sample(TOKENS, cpu)
        takes_positions = "position_ids" in signature(body.base.forward).parameters
        positions = {"position_ids": torch.arange(TOKENS).unsqueeze(0)} if takes_positions else {}
        if not paged:
            use(body.base, "eager")
            library: Any = import_module("transformers.cache_utils")
            cache, first = library.DynamicCache(), min(self._layers)
            update = cache.update

            def updated(keys: Tensor, values: Tensor, layer: int, *others: Any, **options: Any) -> Any:
                if layer < first:
                    return update(keys, values, layer, *others, **options)
                attended(layer, (keys.clone(), values.clone()))
                kept = (change(layer - first, layer, x.transpose(1, 2)).transpose(1, 2) for x in (keys, values))
                return update(*kept, layer, *others, **options)

            cache.update = updated
            body(entry, past_key_values=cache, use_cache=True, **positions)
            return
        if not takes_positions:
            return
        register()
        use(body.base, PAGED)
        token = CALLS.set(_Noted(self._of_module, attended, change))
        try:
            body(entry, use_cache=False, **positions)
        finally:
            CALLS.reset(token)
            use(body.base, "eager")


class _Noted:
    """See `Calls`. In place of attention: some function of a head's own queries, keys and values."""

    def __init__(
        self,
        of_module: dict[nn.Module, int],
        attended: Callable[[int, Kept], None],
        change: Callable[[int, int, Tensor], Tensor],
    ) -> None:
        self._of_module = of_module
        self._attended = attended
        self._change = change
        self._next = 0

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        index, call = self._of_module[module], self._next
        self._next += 1
        self._attended(index, (query.clone(), key.clone(), value.clone()))
        each = query.shape[1] // key.shape[1]
        keys, values = key.repeat_interleave(each, 1), value.repeat_interleave(each, 1)
        out = values * (1 + torch.tanh((query * keys).mean(-1, keepdim=True)))
        return self._change(call, index, out.transpose(1, 2).to(value.dtype))
