"""What goes from one layer of a model to the next where that is more than one residual stream: several streams, keys
and values that later layers share, the tokens themselves.

It is found before a model has weights, from the shapes of a pass alone, so all ranks find the same. Between two stages
it is one row of numbers per token: the streams, what layers have left for later ones, the digits of the token's id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.engine.models.stage_config import DIGITS
from penstock.engine.models.token_digits import digits_of, ids_of
from penstock.engine.models.transformers.attention import CALLS, PAGED
from penstock.engine.models.transformers.interface import register, use

_TOKENS = 5
"""Of the pass that is looked at."""


@dataclass(frozen=True, slots=True)
class Left:
    """A tensor that a layer has left for later ones, in a mapping that all layers are given."""

    option: str
    """The name of the mapping among the options of a layer."""
    key: Any
    place: int | None
    """In a tuple of tensors; None where it lies in the mapping itself."""
    shape: tuple[int, ...]
    """Of one token: the last dimension but one of a tensor is that of tokens."""


@dataclass(frozen=True, slots=True)
class StageRow:
    """See above."""

    stream: tuple[int, ...]
    """Of one token, as in `Left`."""
    left: tuple[tuple[Left, ...], ...]
    """Before each layer: what earlier ones have left for it or for those behind it."""
    tokens: bool
    """Whether layers read the tokens: a stage begins with their ids, and has the embedding."""

    @property
    def stream_width(self) -> int:
        return prod(self.stream)

    @property
    def width(self) -> int:
        """Of a row, the same between any two stages."""
        most = max(sum(prod(one.shape) for one in left) for left in self.left)
        return self.stream_width + most + DIGITS * self.tokens

    def of_tokens(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, width] that only says which tokens they are."""
        return self.marked(torch.zeros(len(token_ids), self.width, dtype=dtype, device=token_ids.device), token_ids)

    def marked(self, row: Tensor, token_ids: Tensor) -> Tensor:
        """`row` of these tokens, changed in place."""
        row[:, -DIGITS:] = digits_of(token_ids, row.dtype)
        return row

    def ids(self, row: Tensor) -> Tensor:
        return ids_of(row[:, -DIGITS:])

    def pack(self, layer: int, stream: Tensor, options: Mapping[str, Any], entry: Tensor) -> Tensor:
        """[T, width] of what `layer` is called with. `entry`: what the stage began with."""
        found = [stream]
        for one in self.left[layer]:
            value = options[one.option][one.key]
            found.append(value if one.place is None else value[one.place])
        parts = [x.movedim(-2, 0).flatten(1).to(entry.dtype) for x in found]
        row = torch.cat(parts, dim=1)
        if not self.tokens:
            return F.pad(row, (0, self.width - row.shape[1]))
        return torch.cat((F.pad(row, (0, self.width - DIGITS - row.shape[1])), entry[:, -DIGITS:]), dim=1)

    def unpack(self, layer: int, row: Tensor, options: Mapping[str, Any]) -> Tensor:
        """The stream that `layer` is called with; what was left for it is put into the mappings in `options`."""
        shapes = [self.stream, *(one.shape for one in self.left[layer])]
        sizes = [prod(shape) for shape in shapes]
        parts = torch.split(row[:, : sum(sizes)], sizes, dim=1)
        stream: Tensor
        stream, *others = (
            part.reshape(len(row), *shape).movedim(0, -2) for part, shape in zip(parts, shapes, strict=True)
        )
        for one, value in zip(self.left[layer], others, strict=True):
            mapping = options[one.option]
            mapping[one.key] = value if one.place is None else (*mapping.get(one.key, ()), value)
        return stream


def find_stage_row(base: nn.Module, name: str, vocabulary: int) -> StageRow | None:
    """Of a model without weights. `name`: of the list of its layers. None where one residual stream is all, or the
    model does not run this way: whether that holds is checked when a stage is loaded."""
    try:
        twin = deepcopy(base)  # a model may keep what it computes, and here that is nothing but shapes
        return _find(twin, twin.get_submodule(name), vocabulary)
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception:  # such as operations that look at values, of which there are none
        return None


def _find(base: nn.Module, layers: Any, vocabulary: int) -> StageRow | None:
    ids = (torch.arange(_TOKENS, device="cpu") * 7 + 3) % vocabulary
    tables: set[nn.Module] = set()
    given: list[set[tuple[str, Any]]] = []
    seen: list[tuple[Tensor, list[Left]]] = []
    last: dict[tuple[str, Any], int] = {}
    """Of what lies in mappings: the last layer that reads it."""

    def note(_: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        held = _held(options)
        if not given:  # what the model itself has put there, every stage has too
            given.append({(one.option, one.key) for one in held})
        stream = arguments[0] if arguments else options["hidden_states"]
        watched = {
            name: _Watched(value, name, len(seen), last)
            for name, value in options.items()
            if isinstance(value, MutableMapping)
        }
        seen.append((stream, [one for one in held if (one.option, one.key) not in given[0]]))
        return arguments, {**options, **watched}

    inside = set(layers.modules())
    for module in base.modules():
        if isinstance(module, nn.Embedding) and module not in inside:
            vars(module)["forward"] = _lookup(module, ids, tables)
    for layer in layers:
        layer.register_forward_pre_hook(note, with_kwargs=True)
    # With the engine's attention there are no masks, for which the library would look at positions.
    register()
    use(base, PAGED)
    token = CALLS.set(_Shapes())
    try:
        with torch.no_grad():
            base(input_ids=ids.unsqueeze(0), use_cache=False)
    finally:
        CALLS.reset(token)
    streams = {_of_token(stream) for stream, _ in seen}
    if len(seen) != len(layers) or len(streams) != 1:
        return None
    left = tuple(
        tuple(one for one in there if last.get((one.option, one.key), -1) >= index)
        for index, (_, there) in enumerate(seen)
    )
    (shape,), plain = streams, len(tables) < 2 and not any(left)
    if shape is None or (plain and len(shape) == 2 and shape[0] == 1):
        return None
    return StageRow(shape, left, len(tables) > 1)


class _Watched(MutableMapping[Any, Any]):
    """A mapping that notes in `last` which layer has read a key of it."""

    def __init__(
        self, mapping: MutableMapping[Any, Any], name: str, layer: int, last: dict[tuple[str, Any], int]
    ) -> None:
        self._mapping, self._name, self._layer, self._last = mapping, name, layer, last

    def __getitem__(self, key: Any) -> Any:
        self._last[self._name, key] = self._layer
        return self._mapping[key]

    def __contains__(self, key: object) -> bool:
        return key in self._mapping

    def __setitem__(self, key: Any, value: Any) -> None:
        self._mapping[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._mapping[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)


class _Shapes:
    """See `Calls`: attention in the shapes of a pass without weights."""

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        return value.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])


def _lookup(module: Any, ids: Tensor, tables: set[nn.Module]) -> Any:
    """Stands for a table: notes whether it is asked for the tokens."""
    plain = module.forward

    def forward(x: Any, *others: Any, **options: Any) -> Any:
        if isinstance(x, Tensor) and x.device == ids.device and torch.equal(x.flatten(), ids):
            tables.add(module)
            return torch.empty(*x.shape, module.embedding_dim, device="meta", dtype=module.weight.dtype)
        return plain(x, *others, **options)

    return forward


def _held(options: Mapping[str, Any]) -> list[Left]:
    """The tensors in mappings among the options of a layer."""
    found = []
    for option, mapping in options.items():
        if not isinstance(mapping, Mapping):
            continue
        for key, value in mapping.items():
            several = isinstance(value, tuple | list)
            for place, one in enumerate(value if several else (value,)):
                shape = _of_token(one) if isinstance(one, Tensor) else None
                if shape is not None:
                    found.append(Left(option, key, place if several else None, shape))
    return found


def _of_token(x: Tensor) -> tuple[int, ...] | None:
    """The shape without the dimension of tokens; None where that is not the last but one."""
    if x.dim() < 2 or x.shape[-2] != _TOKENS:
        return None
    return (*x.shape[:-2], x.shape[-1])
