"""What a model of the `transformers` library keeps of a sequence beside keys and values: the states of Mamba layers, of
linear attention, of short convolutions.

Nothing is assumed of what they are. A few tokens are passed through the model, and what it has then (an object that it
is given or gives out, and attributes of its modules) is searched for tensors. Those that grow with the tokens must be
the keys and values of a layer; the others are the state, of the same size after any number of tokens. Invariant: what
a pass is given is a copy of that object with a sequence's own tensors in it; a model of which anything else changes
with the tokens is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.interface import HeadLayout
from penstock.engine.kv.kinds import StateTensors
from penstock.engine.models.transformers.attention import Site, cached_dim
from penstock.engine.models.transformers.hidden import of_length

_NAMES = ("past_key_values", "cache_params", "state")
"""What models call it, among their arguments and in what they give."""
_LENGTHS = (5, 7, 1)
"""Tokens of the passes that are compared; what is there after the first is copied."""
_MORE = 3
"""Tokens behind those, for seeing which parts of a state they read."""

Path = tuple[Any, ...]
KeysValues = tuple[Tensor, Tensor]


class CannotKeep(Exception):
    """A model whose state cannot be found, with the reason."""


@dataclass(slots=True)
class Kept:
    """What a model has of one sequence."""

    keys_values: list[KeysValues]
    """[1, heads, tokens, dim] of each layer that attends."""
    states: list[Tensor]


class Memory:
    """See above. A model has one sequence at a time: its modules may keep a part of it."""

    def __init__(self, base: Any, name: str, make: Callable[[], Any] | None, attributes: list[Path]) -> None:
        """`name`: of the argument; `make`: what a sequence without tokens has; None: the model makes it. `attributes`:
        of modules, by their names and the attribute's."""
        self._base = base
        self._name = name
        self._make = make
        self._attributes = attributes
        self._modules = dict(base.named_modules())
        self._object: Any = None
        """After a few tokens."""
        self._keys_values: list[tuple[Path, Path]] = []
        self._states: list[Path] = []
        """In the object; those in attributes follow them."""
        self._silent: list[int] = []
        """Layers of the library's cache that could have keys and have none."""
        self.sites: list[Site] = []
        """Layers that attend."""
        self.states = StateTensors(())

    def begin(self) -> Any:
        """For a sequence without tokens."""
        for module, attribute in self._attributes:
            setattr(self._modules[module], attribute, None)
        return None if self._make is None else self._make()

    def resume(self, kept: Kept) -> Any:
        """For one that has some. The tensors are the model's from then on, which may change them in place."""
        inside = dict(_tensors(self._object))
        copies: dict[int, Any] = {id(one): one for one in _configurations(self._object)}
        for paths, both in zip(self._keys_values, kept.keys_values, strict=True):
            copies |= {id(inside[path]): tensor for path, tensor in zip(paths, both, strict=True)}
        for path, tensor in zip(self._states, kept.states, strict=False):
            copies[id(inside[path])] = tensor.view(inside[path].shape)
        for (module, attribute), tensor in zip(self._attributes, kept.states[len(self._states) :], strict=True):
            setattr(self._modules[module], attribute, tensor)
        return deepcopy(self._object, copies)

    def run(self, held: Any, **options: Any) -> tuple[Tensor, Any]:
        """Hidden states [T, hidden], and what the model has then. `held`: what `begin`, `resume` or this has given."""
        if held is not None:
            options[self._name] = held
            self._tell_length(held)
        output = self._base(use_cache=True, **options)
        hidden: Tensor = output.last_hidden_state
        return hidden[0], getattr(output, self._name) if held is None else held

    def _tell_length(self, held: Any) -> None:
        """Models read off the first layer of a cache how many tokens there were, also where that layer has no keys."""
        if not self._silent:
            return
        layers = held.layers
        keys = layers[int(self.sites[0].module)].keys if layers else None
        if keys is not None:
            library: Any = import_module("transformers.cache_utils")
            for index in self._silent:
                layers[index] = of_length(library, keys.shape[2], keys.device)

    def kept(self, held: Any) -> Kept:
        """What is in it, not copied."""
        inside = dict(_tensors(held))
        found = [inside[path] for path in self._states] + list(self._held_by_modules())
        for tensor, (shape, dtype) in zip(found, self.states.parts, strict=True):
            if _shape(tensor) != shape or tensor.dtype != dtype:
                raise CannotKeep("its state has another form behind more tokens")
        return Kept([(inside[keys], inside[values]) for keys, values in self._keys_values], found)

    def learn(self, tokens: Callable[[int], Tensor]) -> None:
        """Find the state in passes of several lengths. `tokens`: that many ids."""
        found: list[dict[Path, Tensor]] = []
        for length in _LENGTHS:
            _, held = self.run(self.begin(), input_ids=tokens(length).unsqueeze(0))
            inside = dict(_tensors(held))
            if self._object is None:
                self._object = held
            if held is None or inside.keys() != dict(_tensors(self._object)).keys():
                raise CannotKeep("it does not give out what it keeps in one form")
            if length != _LENGTHS[-1] and dict(_plain(held)) != dict(_plain(self._object)):
                raise CannotKeep("it counts its tokens in something other than tensors")
            found.append(inside | dict(zip(self._attributes, self._held_by_modules(), strict=True)))
        first = found[0]
        growing = {path for path in first if any(there[path].shape != first[path].shape for there in found)}
        if any(there[path].dtype != first[path].dtype for there in found for path in first):
            raise CannotKeep("what it keeps has another type after other numbers of tokens")
        for path in [path for path in first if path in growing and path[-1] == "keys"]:
            self._add_site(path, found)
        attending = {site.module for site in self.sites}
        for index, layer in enumerate(getattr(self._object, "layers", ()) if self.sites else ()):
            if getattr(layer, "keys", layer) is None and str(index) not in attending:
                self._silent.append(index)
        others = growing - {path for both in self._keys_values for path in both}
        if others:
            raise CannotKeep(f"it keeps {_shown(min(others, key=str))}, which grows with its tokens")
        self._states = [path for path in first if path not in growing and path not in self._attributes]
        kept = [first[path] for path in (*self._states, *self._attributes)]
        self.states = StateTensors(tuple((_shape(tensor), tensor.dtype) for tensor in kept))

    def continues(self, tokens: Callable[[int], Tensor], positions: bool) -> bool:
        """Whether several tokens behind a state read all that one token reads. Some models expect one there, and begin
        anew with several. `positions`: whether the model is told them."""
        _, held = self.run(self.begin(), input_ids=tokens(_LENGTHS[0]).unsqueeze(0))
        kept = self.kept(held)
        kept = Kept(kept.keys_values, [tensor.clone() for tensor in kept.states])
        roles: dict[Any, list[int]] = {}
        for index, path in enumerate((*self._states, *self._attributes)):
            roles.setdefault(_role(path), []).append(index)

        def after(changed: list[int], count: int) -> Tensor:
            states = [x + 1 if index in changed else x.clone() for index, x in enumerate(kept.states)]
            options: dict[str, Any] = {"input_ids": tokens(_LENGTHS[0] + count)[-count:].unsqueeze(0)}
            if positions:
                options["position_ids"] = torch.arange(count, device=states[0].device).unsqueeze(0) + _LENGTHS[0]
            hidden, _ = self.run(self.resume(Kept(list(kept.keys_values), states)), **options)
            return hidden

        plain = {count: after([], count) for count in (1, _MORE)}
        for changed in roles.values():
            read = {count: not torch.equal(after(changed, count), hidden) for count, hidden in plain.items()}
            if read[1] and not read[_MORE]:
                return False
        return True

    def _add_site(self, path: Path, found: list[dict[Path, Tensor]]) -> None:
        """The layer that has these keys."""
        other: Path = (*path[:-1], "values")
        for length, there in zip(_LENGTHS, found, strict=True):
            keys, values = there[path], there.get(other, there[path].new_empty(0))
            if keys.dim() != 4 or keys.shape[2] != length or keys.shape[:3] != values.shape[:3]:
                raise CannotKeep(f"{_shown(path)} are not one key and one value for every token")
        heads, key_dim, value_dim = keys.shape[1], keys.shape[3], values.shape[3]
        layout = HeadLayout(heads=heads, kv_heads=heads, head_dim=cached_dim(key_dim, value_dim), scale=1.0)
        self._keys_values.append((path, other))
        self.sites.append(Site(next(str(part) for part in path if isinstance(part, int)), layout, key_dim, value_dim))

    def _held_by_modules(self) -> Iterator[Tensor]:
        for module, attribute in self._attributes:
            value = getattr(self._modules[module], attribute)
            if not isinstance(value, Tensor):
                raise CannotKeep(f"{module}.{attribute} is not always there")
            yield value


def find_memory(base: Any, tokens: Callable[[int], Tensor]) -> Memory | None:
    """None where the model keeps keys and values only. CannotKeep: it keeps more, and what that is cannot be told."""
    library: Any = import_module("transformers.cache_utils")
    output = base(input_ids=tokens(_LENGTHS[0]).unsqueeze(0), use_cache=True)
    name = next((name for name in _NAMES if getattr(output, name, None) is not None), None)
    after = dict(_module_tensors(base))
    base(input_ids=tokens(_LENGTHS[0]).unsqueeze(0), use_cache=False)
    before = dict(_module_tensors(base))
    attributes = [path for path, tensor in after.items() if before.get(path) is not tensor]
    if name is None:
        name = next((name for name in _NAMES if name in signature(base.forward).parameters), None)
        if name is None:
            raise CannotKeep("it does not give out what it keeps")
        made = library.DynamicCache(config=base.config)
    else:
        made = getattr(output, name)
    memory = Memory(base, name, _maker(library, made), attributes)
    memory.learn(tokens)
    return memory if memory.states.parts else None


def _maker(library: Any, made: Any) -> Callable[[], Any] | None:
    """Makes such an object without tokens. Layers with windows keep all of their tokens, as blocks do."""
    if not isinstance(made, library.Cache):
        return None
    if type(made) is not library.DynamicCache:
        return type(made)
    both = library.LinearAttentionAndFullAttentionLayer
    whole: dict[Any, Any] = {
        library.DynamicLayer: library.DynamicLayer,
        library.DynamicSlidingWindowLayer: library.DynamicLayer,
        library.LinearAttentionLayer: library.LinearAttentionLayer,
        both: both,
        library.LinearAttentionAndSlidingWindowAttentionLayer: both,
    }
    layers = []
    for index, layer in enumerate(made.layers):
        kind = whole.get(type(layer))
        if kind is None:
            raise CannotKeep(f"layer {index} keeps a {type(layer).__name__}")
        states = getattr(layer, "number_of_states", None)
        layers.append(kind if states is None else partial(kind, number_of_states=states))
    return lambda: library.Cache(layers=[make() for make in layers])


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All that an object consists of, but classes and functions."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(each, (*path, key))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _leaves(each, (*path, index))
    elif isinstance(value, Tensor) or not hasattr(value, "__dict__") or _is_configuration(value) or callable(value):
        yield path, value
    else:
        yield from _leaves(vars(value), path)


def _is_configuration(value: Any) -> bool:
    return isinstance(value, import_module("transformers").PreTrainedConfig)


def _tensors(value: Any) -> Iterator[tuple[Path, Tensor]]:
    return ((path, leaf) for path, leaf in _leaves(value) if isinstance(leaf, Tensor))


def _plain(value: Any) -> Iterator[tuple[Path, Any]]:
    return ((path, leaf) for path, leaf in _leaves(value) if isinstance(leaf, bool | int | float | str | None))


def _configurations(value: Any) -> Iterator[Any]:
    return (leaf for _, leaf in _leaves(value) if _is_configuration(leaf))


def _module_tensors(base: Any) -> Iterator[tuple[Path, Tensor]]:
    """Tensors that modules have beside weights and buffers."""
    for name, module in base.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor):
                yield (name, attribute), value


def _role(path: Path) -> Path:
    """The same for all layers."""
    layer = next((at for at, part in enumerate(path) if at and isinstance(part, int)), None)
    return tuple(
        re.sub(r"\d+", "", part) if isinstance(part, str) else part for at, part in enumerate(path) if at != layer
    )


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape) or (1,)


def _shown(path: Path) -> str:
    return ".".join(map(str, path))
