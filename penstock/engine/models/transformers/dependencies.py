"""Which outputs of a layer's linears reach which inputs of others, found by changing them.

A layer of the `transformers` library is run with its linears replaced by constants: what one of them gives is changed,
row range by row range, and the inputs of the others show how far that reaches. Where the inputs of a linear are divided
between shards, this says which rows each shard needs of the linears before it: heads of queries, keys and values in
whatever order they are stored, gates and their products. Nothing is assumed of names or of the layer's code. A row that
reaches several parts (keys of a head that all queries share, norms over a whole row) is needed by all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.models.transformers.body import CannotDivide
from penstock.engine.models.transformers.linears import linears_of, shape_of

_RUNS = 2000
"""Most passes through a layer for the rows of one linear; what is not resolved then is needed by all shards."""
_LOST = 8
"""A linear of which that many rows, spread over it, each reach several parts is not divided."""


@dataclass(frozen=True, slots=True)
class LayerCuts:
    """How the linears of a layer are divided, by their names below it."""

    rows: dict[str, Tensor]
    """Linears of which a shard has some outputs: bool [outputs, shards], whether a shard needs one."""
    columns: tuple[str, ...]
    """Linears of which it has an equal run of inputs, and behind which the shards add up."""
    targets: dict[str, set[str]] = field(default_factory=dict)
    """Of `rows`: which of `columns` each reaches."""

    def columns_of(self, name: str) -> set[str]:
        return self.targets[name]


@dataclass(slots=True)
class _Seen:
    """One pass: what each linear was called with, and what came out."""

    inputs: dict[str, list[Tensor]]
    others: list[Tensor]
    """What the layer gives, and inputs of its experts."""


class LayerProbe:
    """A layer with constants in place of its linears. `arguments` and `options`: what the model calls it with."""

    def __init__(self, layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], parts: int) -> None:
        self._layer = layer
        self._arguments, self._options = _floats(arguments), _floats(options)
        self._parts = parts
        self._linears = dict(linears_of(layer))
        self._shapes = {name: shape_of(module) for name, module in self._linears.items()}
        self._tokens = int(self._stream().shape[-2])
        seeded = torch.Generator().manual_seed(0)

        def noise(outputs: int) -> Tensor:
            return torch.randn(self._tokens, outputs, generator=seeded)

        self._constants = {name: 0.5 * noise(outputs) for name, (outputs, _) in self._shapes.items()}
        signed = {name: noise(outputs) for name, (outputs, _) in self._shapes.items()}
        self._changes = {name: noise.sign() * (1.5 + noise.abs()) for name, noise in signed.items()}
        self._runs = 0

    def cuts(self) -> LayerCuts:
        with _in_float32(self._layer):
            self._plain = self._run()
            once = [name for name, seen in self._plain.inputs.items() if self._regular(seen)]
            into = {name for name in once if self._shapes[name][1] % self._parts == 0}
            reach = {name: self._reach(name, into) for name in once}
            usable = {name: found for name, found in reach.items() if found}
            rows = {name: found for name in usable if (found := self._rows(name, usable[name])) is not None}
        while True:
            # A linear that gives rows to another is not itself cut by inputs.
            fed = {target for name in rows for target in usable[name]} - rows.keys()
            kept = {name: found for name, found in rows.items() if usable[name] <= fed}
            if len(kept) == len(rows):
                return LayerCuts(rows, tuple(sorted(fed)), {name: usable[name] for name in rows})
            rows = kept

    def _stream(self) -> Tensor:
        found = self._arguments[0] if self._arguments else self._options["hidden_states"]
        assert isinstance(found, Tensor)
        return found

    def _regular(self, seen: list[Tensor]) -> bool:
        return len(seen) == 1 and len(seen[0]) == self._tokens

    def _reach(self, name: str, into: set[str]) -> set[str]:
        """The linears whose inputs all outputs of `name` together change; none where they change anything else."""
        found: set[str] = set()
        for seen in self._changed(name, 0, self._shapes[name][0]):
            if any(_differs(a, b) for a, b in zip(seen.others, self._plain.others, strict=True)):
                return set()
            for other, inputs in self._plain.inputs.items():
                there = seen.inputs.get(other, [])
                if len(there) != len(inputs) or any(_differs(a, b) for a, b in zip(there, inputs, strict=True)):
                    found.add(other)
        return found if found <= into - {name} else set()

    def _rows(self, name: str, targets: set[str]) -> Tensor | None:
        """See `LayerCuts.rows`; None where no row is of one part alone, or a part has none."""
        size = self._shapes[name][0]
        needed = torch.ones(size, self._parts, dtype=torch.bool)
        self._runs = 0
        spread = {int(row) for row in torch.linspace(0, size - 1, _LOST)}
        if all(self._hits(name, row, row + 1, targets).sum() > 1 for row in spread):
            return None
        ranges = [(0, size)]
        while ranges and self._runs < _RUNS:
            begin, end = ranges.pop(0)
            hits = self._hits(name, begin, end, targets)
            if hits.sum() == 1:
                needed[begin:end] = hits
            elif hits.any() and end - begin > 1:  # what changes nothing is left to all
                middle = (begin + end) // 2
                ranges += [(begin, middle), (middle, end)]
        return needed if bool((needed.sum(1) == 1).any() and needed.any(0).all()) else None

    def _hits(self, name: str, begin: int, end: int, targets: set[str]) -> Tensor:
        """Which parts of the inputs of `targets` some rows reach."""
        hits = torch.zeros(self._parts, dtype=torch.bool)
        for seen in self._changed(name, begin, end):
            for target in targets:
                there, here = seen.inputs[target][0], self._plain.inputs[target][0]
                hits |= (there != here).any(0).view(self._parts, -1).any(1)
        return hits

    def _changed(self, name: str, begin: int, end: int) -> Iterator[_Seen]:
        """Upwards and downwards: an activation may not show one of them."""
        for factor in (1.0, -1.0):
            yield self._run(name, slice(begin, end), factor)

    def _run(self, name: str = "", rows: slice = slice(0), factor: float = 0.0) -> _Seen:
        seen = _Seen({}, [])
        self._runs += 1

        def stand_in(linear: str) -> Any:
            def forward(x: Tensor) -> Tensor:
                flat = x.reshape(-1, x.shape[-1])
                seen.inputs.setdefault(linear, []).append(flat.float())
                constant = self._constants[linear].clone()  # the layer may write into it
                if len(flat) != self._tokens:
                    constant = constant[:1].repeat(len(flat), 1)
                elif linear == name:
                    constant[:, rows] += factor * self._changes[linear][:, rows]
                return constant.reshape(*x.shape[:-1], -1).to(x.dtype)

            return forward

        def experts(x: Tensor, *others: Any, **options: Any) -> Tensor:
            given = (x, *others, *options.values())
            seen.others.extend(one.float() for one in given if isinstance(one, Tensor))
            return torch.zeros_like(x)

        forwards = {module: stand_in(linear) for linear, module in self._linears.items()}
        with _forwards(forwards | dict.fromkeys(experts_of(self._layer).values(), experts)):
            out = self._layer(*_copied(self._arguments), **_copied(self._options))
        seen.others.append(stream_in(out).float())
        return seen


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold experts as stacked parameters and are called with tokens, indices and weights."""
    found = {}
    for name, module in model.named_modules():
        count = getattr(module, "num_experts", None)
        takes: Any = signature(type(module).forward).parameters
        if not isinstance(count, int) or list(takes)[1:] != ["hidden_states", "top_k_index", "top_k_weights"]:
            continue
        stacks = [value.dim() > 1 and len(value) == count for value in module.parameters()]
        if stacks and all(stacks):
            found[name] = module
    return found


@contextmanager
def _forwards(forwards: dict[nn.Module, Any]) -> Iterator[None]:
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            vars(module).pop("forward", None)


@contextmanager
def _in_float32(layer: nn.Module) -> Iterator[None]:
    """What is not a linear nor experts, so that no change is lost in rounding."""
    large = [*(module for _, module in linears_of(layer)), *experts_of(layer).values()]
    theirs = {id(value) for module in large for value in module.parameters()}
    kept: list[tuple[Tensor, Tensor]] = []
    for value in (*layer.parameters(), *layer.buffers()):
        if id(value) not in theirs and value.is_floating_point() and value.dtype != torch.float32:
            kept.append((value, value.data))
            value.data = value.data.float()
    try:
        yield
    finally:
        for value, data in kept:
            value.data = data


def _differs(a: Tensor, b: Tensor) -> bool:
    return a.shape != b.shape or not torch.equal(a, b)


def stream_in(out: Any) -> Tensor:
    """The residual stream in what a layer returns; what may be beside it, such as scores, is not passed on."""
    found = out[0] if isinstance(out, (tuple, list)) else out
    if not isinstance(found, Tensor):
        raise CannotDivide("its layers return something other than one residual stream")
    return found


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(each, change) for each in value)
    if type(value) is dict:
        return {key: _mapped(each, change) for key, each in value.items()}
    return value


def _floats(value: Any) -> Any:
    return _mapped(value, lambda x: x.float() if x.is_floating_point() else x)


def _copied(value: Any) -> Any:
    return _mapped(value, torch.clone)
