"""The tensors of an adapter's file by module, and a file in which other tensors stand in their place."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from penstock.engine.adapters.layout import ANY, LAYER, AdapterLayout, Site
from penstock.engine.adapters.spec import WEIGHTS
from penstock.errors import CheckpointError

_LAYER = re.compile(LAYER + r"([\w.]+)")
_EXPERT = re.compile(r"(\bexperts\.)\d+(?=\.)")
PREFIX = "base_model.model."

Shape = tuple[int, int]
"""Outputs and inputs of a linear."""


class Tensors(Protocol):
    """What is used of a safetensors handle."""

    def keys(self) -> Iterable[str]: ...

    def get_tensor(self, key: str) -> Tensor: ...

    def get_slice(self, key: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class Module:
    """What a file has of one module."""

    key: str
    """Its path, with what PEFT has before it."""
    shape: Shape | None
    """Of its matrix in the model; None: the model has no such module."""
    keys: Mapping[str, str]
    """Of its tensors, by their names behind the path."""
    stored: Tensors

    @property
    def path(self) -> str:
        return self.key.removeprefix(PREFIX)

    def size(self, name: str, dims: int | None = None) -> tuple[int, ...]:
        """`dims`: how many it must have."""
        size = tuple(self.stored.get_slice(self._key(name)).get_shape())
        if dims is not None and len(size) != dims:
            raise CheckpointError(f"{WEIGHTS}: {self.path}.{name} is {size}; here it must have {dims} dimensions")
        return size

    def tensor(self, name: str, *sizes: int | None) -> Tensor:
        """In float32. `sizes`: those it must have; None: any."""
        tensor = self.stored.get_tensor(self._key(name))
        found = tuple(tensor.shape)
        if len(found) != len(sizes) or any(want not in (None, got) for want, got in zip(sizes, found, strict=True)):
            wanted = ", ".join("any" if size is None else str(size) for size in sizes)
            raise CheckpointError(f"{WEIGHTS}: {self.path}.{name} is {found}; here it must be ({wanted})")
        return tensor.float()

    def model_shape(self) -> Shape:
        if self.shape is None:
            raise CheckpointError(f"{WEIGHTS}: cannot apply {self.path}, which is no linear that adapters may change")
        return self.shape

    def _key(self, name: str) -> str:
        if name not in self.keys:
            raise CheckpointError(f"{WEIGHTS}: {self.path} has no {name}")
        return self.keys[name]


def modules_of(
    tensors: Tensors, names: Collection[str], layout: AdapterLayout
) -> tuple[Sequence[Module], Sequence[str]]:
    """Modules with tensors of these names, and the keys of all other tensors."""
    pattern = re.compile(rf"(.+)\.({'|'.join(sorted(names, key=len, reverse=True))})(?:\.default)?(?:\.weight)?")
    found: dict[str, dict[str, str]] = {}
    others = []
    for key in tensors.keys():  # noqa: SIM118 - a safetensors handle is not a mapping
        match = pattern.fullmatch(key)
        if match is None:
            others.append(key)
        else:
            found.setdefault(match[1], {})[match[2]] = key
    modules = [Module(key, _shape(layout, key), keys, tensors) for key, keys in found.items()]
    return modules, others


def layer_of(layout: AdapterLayout, path: str) -> int | None:
    """The layer of the module with this path; None: it is in none."""
    inside = _LAYER.fullmatch(path)
    return None if inside is None else layout.numbered(inside[1], inside[2])


def site_of(layout: AdapterLayout, path: str) -> tuple[int, int] | None:
    """The site of the module with this path, and which part of it; -1: all parts."""
    inside = _LAYER.fullmatch(path)
    if inside is None:
        name = path.rpartition(".")[2]
        return next(((index, 0) for index, site in enumerate(layout.sites) if site.end and name in site.modules), None)
    layer, module = layout.numbered(inside[1], inside[2]), _EXPERT.sub(rf"\g<1>{ANY}", inside[3])
    for index, site in enumerate(layout.sites):
        if site.end or layer >= layout.layers or not site.is_in(layer):
            continue
        if module == site.fused:
            return index, -1
        if module in site.modules:
            return index, site.modules.index(module)
        if module in site.aliases:
            return index, 0
    return None


def _shape(layout: AdapterLayout, key: str) -> Shape | None:
    found = site_of(layout, key)
    if found is None:
        return None
    index, part = found
    site: Site = layout.sites[index]
    if site.heads:
        keys, values = layout.sites[index : index + 2]
        return keys.experts * (keys.inputs + values.outputs), values.inputs
    return (site.outputs if part < 0 else site.sizes[part]), site.inputs


class _Made:
    """See `Tensors.get_slice`."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)


class Converted:
    """A file some of whose tensors are computed when they are asked for; see `Tensors`."""

    def __init__(self, stored: Tensors, kept: Sequence[str], made: Mapping[str, Callable[[], Tensor]]) -> None:
        """`kept`: those that stay as they are."""
        self._stored = stored
        self._kept = kept
        self._made = made

    def keys(self) -> Iterable[str]:
        return [*self._kept, *self._made]

    def get_tensor(self, key: str) -> Tensor:
        make = self._made.get(key)
        return self._stored.get_tensor(key) if make is None else make()

    def get_slice(self, key: str) -> Any:
        make = self._made.get(key)
        return self._stored.get_slice(key) if make is None else _Made(make())
