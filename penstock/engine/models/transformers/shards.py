"""How the linears of a model of the `transformers` library are cut between tensor-parallel shards.

The library says it for most models (`tp_plan`); of the others, pairs of linears with the usual names are cut. Linears
cut by outputs come before one cut by inputs, behind which the shards add up. All else is whole on every shard, experts
too. That the result is the model's is not assumed: it is compared with what the library computes (`comparison`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from penstock.engine.models.transformers.linears import linears_of, shape_of
from penstock.errors import ConfigError

Side = Literal["outputs", "inputs"]
Span = tuple[int, int]

_SIDES: dict[str, Side] = {"colwise": "outputs", "rowwise": "inputs"}
_WHOLE = ("colwise_gather_output", "rowwise_split_input", "replicated", "embedding", "ep_router", "moe", "grouped")
"""How the names of the library's ways begin after which a module may be whole on every shard."""
_USUAL: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj", "dense")),
    (("gate_proj", "up_proj"), ("down_proj",)),
    (("fc1",), ("fc2",)),
    (("fc_in",), ("fc_out",)),
)


_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_heads")
"""How modules that attend call their numbers of heads, where they do not read them off their tensors."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of several."""

    index: int
    count: int
    sum: Callable[[Tensor], Tensor]
    """Adds up what all shards have. ReplicaLost where one of them is gone."""
    wait: Callable[[], object]
    """Until all have come so far; raises what another one has failed with."""

    def span(self, size: int) -> Span:
        part = size // self.count
        return self.index * part, (self.index + 1) * part


class Cuts:
    """Which side of which linear is cut, by the names of a model's modules."""

    def __init__(self, model: Any, shard: Shard) -> None:
        self.shard = shard
        shapes = {name: shape_of(module) for name, module in linears_of(model)}
        self.sides = self._planned(model, shapes) or _usual(shapes)
        if not self.sides:
            raise ConfigError(
                f"tensor_parallel: transformers has no plan for the linears of {model.config.model_type} models, and "
                "their names are not the usual ones; pipeline_parallel divides models by layers"
            )
        for name, side in self.sides.items():
            size = shapes[name][0 if side == "outputs" else 1]
            if size % shard.count:
                raise ConfigError(f"tensor_parallel: {shard.count} does not divide the {size} {side} of {name}")

    def _planned(self, model: Any, shapes: dict[str, tuple[int, int]]) -> dict[str, Side]:
        sides: dict[str, Side] = {}
        self.parameters: list[str] = []
        """One-dimensional parameters, such as sinks, cut like heads."""
        for pattern, way in (getattr(model, "tp_plan", None) or {}).items():
            if str(way).startswith(_WHOLE) or ".experts" in pattern:
                continue
            named = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
            found = [name for name in shapes if named.fullmatch(name)]
            vectors = [name for name, value in model.named_parameters() if named.fullmatch(name) and value.dim() == 1]
            if way not in _SIDES or (vectors and way != "colwise"):
                if found or vectors:
                    raise ConfigError(
                        f"tensor_parallel: {(found + vectors)[0]} would be cut in a way ({way}) that is not supported"
                    )
                continue
            sides |= dict.fromkeys(found, _SIDES[way])
            self.parameters += vectors
        return sides

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        """A shard's part of a weight [out, in] or of a bias."""
        module, _, kind = name.rpartition(".")
        side = self.sides.get(module)
        if side is None:
            return tensor
        if side == "outputs":
            begin, end = self.shard.span(len(tensor))
            return tensor[begin:end].contiguous()
        if kind == "bias":  # it is added to a sum
            return tensor if self.shard.index == 0 else tensor.new_zeros(tensor.shape)
        begin, end = self.shard.span(tensor.shape[1])
        return tensor[:, begin:end].contiguous()

    def cut_parts(self, model: nn.Module) -> None:
        """What goes with the linears: parameters of heads, and numbers of heads."""
        owners = {name.rpartition(".")[0] for name, side in self.sides.items() if side == "outputs"}
        for owner in owners:
            module = model.get_submodule(owner)
            for count in _COUNTS:
                whole = vars(module).get(count)
                if isinstance(whole, int) and whole % self.shard.count == 0:
                    setattr(module, count, whole // self.shard.count)
        for name in self.parameters:
            above, _, last = name.rpartition(".")
            holder: Any = model.get_submodule(above)
            heads = getattr(holder, last)
            begin, end = self.shard.span(len(heads))
            setattr(holder, last, nn.Parameter(heads[begin:end].clone(), requires_grad=False))


def _usual(shapes: dict[str, tuple[int, int]]) -> dict[str, Side]:
    """Pairs that lie in one module, by their names."""
    sides: dict[str, Side] = {}
    owners = {name.rpartition(".")[0] for name in shapes}
    for owner in owners:
        for before, behind in _USUAL:
            first = [f"{owner}.{name}" for name in before if f"{owner}.{name}" in shapes]
            last = [f"{owner}.{name}" for name in behind if f"{owner}.{name}" in shapes]
            if first and len(last) == 1 and shapes[last[0]][1] <= max(shapes[name][0] for name in first):
                for name in first:
                    sides[name] = "outputs"
                sides[last[0]] = "inputs"
    return sides
