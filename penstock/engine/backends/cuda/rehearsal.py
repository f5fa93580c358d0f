"""What is launched before a step is captured: one layer of each kind, so that every kernel of the step is there.

A kernel that is not built or not loaded yet cannot be launched while a graph is captured. Layers that are made alike
launch the same kernels, so a few of them take the place of all: running a step of a thousand tokens once through all
layers takes longer than capturing it.
"""

from __future__ import annotations

import dataclasses
from copy import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from penstock.engine.kv.cache import KVCache
from penstock.engine.models.decoder import Decoder

_ALIGNED = 16
"""Kernels are built for addresses that are multiples of this, and for others."""


class Short:
    """A decoder and its cache in short, found when it is first asked for."""

    def __init__(self, decoder: Decoder, kv: KVCache) -> None:
        self._whole = decoder, kv
        self._found: tuple[Decoder, KVCache] | None = None

    @property
    def parts(self) -> tuple[Decoder, KVCache]:
        if self._found is None:
            self._found = shortened(*self._whole)
        return self._found

    def forget(self) -> None:
        """Its tensors are about to move."""
        self._found = None


def shortened(decoder: Decoder, kv: KVCache) -> tuple[Decoder, KVCache]:
    """The decoder and its cache with few layers: the first, the last, and of all others one of each make behind one of
    each make. As they are where layers depend on how many there are."""
    if not decoder.uniform or len(decoder.layers) != len(kv.layers):
        return decoder, kv
    number = Makes()
    makes = [number.of(parts) for parts in zip(decoder.layers, kv.layers, strict=True)]
    pairs: dict[object, int] = {}
    for index, pair in enumerate(pairwise(makes)):
        pairs.setdefault(pair, index)
    kept = sorted({0, len(makes) - 1, *pairs.values(), *(index + 1 for index in pairs.values())})
    if len(kept) == len(decoder.layers):
        return decoder, kv
    few = copy(kv)
    few.layers = [kv.layers[index] for index in kept]
    return dataclasses.replace(decoder, layers=[decoder.layers[index] for index in kept]), few


class Makes:
    """Numbers for parts of layers, equal where parts differ in nothing but the numbers in their tensors.

    Every object is looked at once, however many others have it. What is not the engine's own (a module, a stream) is
    like nothing but itself, and is not looked into.
    """

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._known: dict[int, tuple[int, object]] = {}
        """The number of an object by its identity; the object too, so that none takes its place."""
        self._within: list[int] = []

    def of(self, part: Any) -> int:
        at = id(part)
        if at in self._known:
            return self._known[at][0]
        if at in self._within:
            return self._within.index(at) - len(self._within)  # how far above this it is
        self._within.append(at)
        described = self._describe(part)
        self._within.pop()
        number = self._numbers.setdefault(described, len(self._numbers))
        self._known[at] = number, part
        return number

    def _describe(self, part: Any) -> object:
        if isinstance(part, Tensor):
            aligned = part.layout is not torch.strided or part.data_ptr() % _ALIGNED == 0
            return tuple(part.shape), part.stride(), part.dtype, part.device, aligned
        if part is None or isinstance(part, bool | int | float | str | bytes | torch.dtype | torch.device):
            return type(part), part
        if isinstance(part, tuple | list):
            return type(part), tuple(self.of(one) for one in part)
        if isinstance(part, dict):
            return dict, tuple((self.of(key), self.of(value)) for key, value in part.items())
        if callable(part) and not hasattr(part, "weight_bytes"):  # linears are called, too
            return type(part), getattr(part, "__module__", None), getattr(part, "__qualname__", id(part))
        if type(part).__module__.partition(".")[0] != "penstock":
            return type(part), id(part)
        return type(part), tuple((name, self.of(value)) for name, value in _attributes(part))


def _attributes(part: Any) -> list[tuple[str, Any]]:
    names = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
    return [(name, getattr(part, name, None)) for name in (*names, *getattr(part, "__dict__", ()))]
