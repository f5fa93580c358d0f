"""The engine's linears in a model of the `transformers` library: in place of `nn.Linear` and `Conv1D`, so that weights
have the form that is fastest here, may be quantized, and take adapters."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.transformers.cuts import Cuts
from penstock.engine.models.weights import WeightReader
from penstock.errors import CheckpointError

_KINDS = frozenset({"Linear", "Conv1D", "FalconLinear", "AwaitedLinear"})
"""Classes that compute x W^T + b and nothing else; a subclass by another name may compute more."""

_APART = 0.5
"""How far a linear may be from the library's, relative to what it gives: rounding to 4 bits changes about a tenth,
another or a transposed matrix more than all of it."""

Shapes = dict[str, tuple[int, int]]
"""Of a layer's linears: inputs and outputs, by the name below the layer."""

_IN_LAYER = re.compile(r"(?:^|\.)(\d+)\.(.+)$")
"""The first number in a module's name is that of its layer."""


class EngineLinear(nn.Module):
    """Calls a linear of the engine's on packed tokens."""

    def __init__(self, name: str, linear: Linear, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.name = name
        self.linear = linear
        self.in_features = inputs
        self.out_features = outputs
        found = _IN_LAYER.search(name)
        self.weight = torch.empty(0, dtype=dtype)
        """Some models ask linears for the type of their weights; these have another form."""
        self.columns: tuple[int, int] | None = None
        """Where it is cut by inputs: which."""
        self.over_ranks: Callable[[Tensor], Tensor] | None = None
        """The same: adds up what all shards have."""
        self.rows: Tensor | None = None
        """Where it is cut by outputs: the numbers of those that it has. The others are zero."""
        self.layer = None if found is None else int(found[1])
        self.module = "" if found is None else found[2]
        """Its name below the layer."""
        self.placed: Any = None
        self.kernel: Any = None
        """Adds the step's adapters, at `placed` (`adapters.library_modules`); None in steps without."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if self.columns is not None:
            rows = rows[:, slice(*self.columns)]
        rows = rows.contiguous()
        if self.kernel is None:
            y = self.linear(rows)
        else:
            inputs = self.kernel.banks.inputs
            y = (self.linear if inputs is None else inputs.over(self.linear, self.placed))(rows)
            self.kernel.add(rows, y, self.placed)
        if self.over_ranks is not None:
            y = self.over_ranks(y)
        if self.rows is not None:
            y = y.new_zeros(len(y), self.out_features).index_copy_(1, self.rows, y)
        return y.view(*x.shape[:-1], self.out_features)


class AwaitedLinear(nn.Module):
    """Stands for a linear that is made of what a checkpoint has in few bits: the library need not read its values."""

    def __init__(self, shape: tuple[int, int], biased: bool) -> None:
        super().__init__()
        self.shape = shape
        self.biased = biased
        # Some models initialize the weights of certain linears by name, before any are read.
        self.weight = torch.empty(0, device="cpu")
        self.bias = torch.empty(0, device="cpu") if biased else None


def await_linears(model: Any, reader: WeightReader) -> Callable[[str], bool]:
    """Take out the linears that `reader` can make by itself, before the library reads their values. Returns whether a
    name in the checkpoint is one of theirs."""
    head = model.get_output_embeddings() if getattr(model.config, "tie_word_embeddings", False) else None
    taken: set[str] = set()
    for name, module in linears_of(model):
        if module is not head and _stores(reader, name, module):
            above, _, last = name.rpartition(".")
            setattr(model.get_submodule(above), last, AwaitedLinear(shape_of(module), _is_biased(module)))
            taken |= {f"{name}.weight", f"{name}.bias"}
    return taken.__contains__


def read_directly(model: nn.Module, run: Callable[[], object]) -> frozenset[str]:
    """The linears whose matrix a pass of `run` multiplies by itself and that it never calls (time steps of Mamba, some
    routers): they stay the library's."""
    called: set[str] = set()
    read: set[str] = set()
    kinds = {name: (module, type(module)) for name, module in linears_of(model)}
    if any(isinstance(module, AwaitedLinear) for module, _ in kinds.values()):
        return frozenset()  # it cannot be run before they are replaced
    hooks = []
    try:
        for name, (module, kind) in kinds.items():

            def forward(_: nn.Module, __: Any, name: str = name) -> None:
                called.add(name)

            def weight(self: Any, attribute: str, name: str = name) -> Any:
                if attribute == "weight":
                    read.add(name)
                return nn.Module.__getattr__(self, attribute)

            hooks.append(module.register_forward_pre_hook(forward))
            module.__class__ = type(kind.__name__, (kind,), {"__getattr__": weight})
        run()
    finally:
        for hook in hooks:
            hook.remove()
        for module, kind in kinds.values():
            module.__class__ = kind
    return frozenset(read - called)


class ModuleWeights:
    """The weights of a loaded model. See `Weights`."""

    def __init__(
        self, model: nn.Module, config: dict[str, Any], cut: Callable[[str, Tensor], Tensor] | None = None
    ) -> None:
        """`cut`: takes this shard's part of a tensor."""
        self.config = config
        self._modules = {name: module for name, module in linears_of(model) if not isinstance(module, AwaitedLinear)}
        self._cut = cut

    def names(self) -> Collection[str]:
        parts = [(name, module) for name, module in self._modules.items()]
        biases = [f"{name}.bias" for name, module in parts if getattr(module, "bias", None) is not None]
        return {f"{name}.weight" for name in self._modules} | set(biases)

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        stem, _, kind = name.rpartition(".")
        module: Any = self._modules[stem]
        tensor: Tensor = getattr(module, kind).detach()
        if kind == "weight" and type(module).__name__ == "Conv1D":
            tensor = tensor.t().contiguous()
        return (tensor if self._cut is None else self._cut(name, tensor)).to(device)

    def release(self, name: str) -> None:
        """Forget a module whose weights were read."""
        self._modules.pop(name, None)


def linears_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules to replace, by name."""
    return [(name, module) for name, module in model.named_modules() if type(module).__name__ in _KINDS]


def shape_of(module: Any) -> tuple[int, int]:
    """Outputs and inputs."""
    if isinstance(module, AwaitedLinear):
        return module.shape
    rows, columns = module.weight.shape
    return (columns, rows) if type(module).__name__ == "Conv1D" else (rows, columns)


def shapes_by_layer(model: nn.Module) -> dict[int, Shapes]:
    """Of all linears in layers, by the number of the layer."""
    shapes: dict[int, Shapes] = {}
    for name, module in linears_of(model):
        found = _IN_LAYER.search(name)
        if found is not None:
            outputs, inputs = shape_of(module)
            shapes.setdefault(int(found[1]), {})[found[2]] = (inputs, outputs)
    return shapes


def integer_matrices(weights: object) -> Collection[str]:
    """The matrices that a checkpoint has in integers, which are [out, in] whatever module they are for."""
    found: Collection[str] = getattr(weights, "integer_matrices", ())
    return found


def replace_linears(
    model: nn.Module,
    read: WeightReader,
    weights: ModuleWeights,
    head: str,
    as_stored: WeightReader | None = None,
    cuts: Cuts | None = None,
    others: Collection[str] = (),
) -> list[EngineLinear]:
    """Replace every linear; memory peaks at the model plus one of them. `head`: the name of the output projection.
    `as_stored` reads a checkpoint in few bits: the linears that it has by the name of their module are made of it.
    `cuts`: which of them `weights` has cut. `others` are left as they are."""
    made = []
    for name, module in linears_of(model):
        if name in others:
            continue
        outputs, inputs = shape_of(module)
        own_outputs, own_inputs = (outputs, inputs) if cuts is None else cuts.sizes(name, outputs, inputs)
        above, _, last = name.rpartition(".")
        bias = _is_biased(module)
        reader = as_stored if as_stored is not None and _stores(as_stored, name, module) else read
        linear = reader.linear(f"{above}." if above else "", {last: own_outputs}, own_inputs, bias)
        if not isinstance(module, AwaitedLinear):
            _check(name, linear, module, cuts, read.backend.device, read.dtype)
        if name == head:
            linear = read.backend.as_head(linear)
        replaced = EngineLinear(name, linear, inputs, outputs, read.dtype)
        if cuts is not None and name in cuts.columns:
            replaced.columns, replaced.over_ranks = cuts.columns[name], cuts.shard.sum
        if cuts is not None and name in cuts.rows:
            numbers = [torch.arange(begin, end) for begin, end in cuts.rows[name]]
            replaced.rows = torch.cat(numbers).to(read.backend.device)
        setattr(model.get_submodule(above), last, replaced)
        weights.release(name)
        made.append(replaced)
    return made


def _check(name: str, linear: Linear, module: Any, cuts: Cuts | None, device: torch.device, dtype: torch.dtype) -> None:
    """CheckpointError where the engine's linear, or this shard's part of it, does not compute what the library's does.
    A comparison of logits in 16 bits would not show a single wrong matrix for sure; this does."""
    weight: Tensor = module.weight
    expected: Tensor
    _, inputs = shape_of(module)
    seeded = torch.Generator().manual_seed(0)
    x = torch.randn(4, inputs, generator=seeded).to(weight.device, weight.dtype)
    columns = None if cuts is None else cuts.columns.get(name)
    own = x if columns is None else x[:, slice(*columns)]
    if columns is not None:
        x = torch.zeros_like(x).index_copy_(1, torch.arange(*columns, device=x.device), own)
    if cuts is not None and columns is not None and cuts.shard.index:  # without the bias
        expected = x @ (weight if type(module).__name__ == "Conv1D" else weight.t())
    else:
        expected = module(x)
    expected = expected.float()
    if cuts is not None and name in cuts.rows:
        expected = torch.cat([expected[:, begin:end] for begin, end in cuts.rows[name]], dim=1)
    found = linear(own.to(device, dtype).contiguous()).to(expected.device).float()
    apart = float((found - expected).norm()) / max(float(expected.norm()), 1e-6)
    if not apart < _APART:
        raise CheckpointError(f"{name} computes something else than in transformers, relatively by {apart:.2g}")


def _stores(reader: WeightReader, name: str, module: nn.Module) -> bool:
    """Whether a checkpoint in few bits has this module as [out, in], by its own name."""
    weight = f"{name}.weight"
    turned = type(module).__name__ == "Conv1D" and weight not in integer_matrices(reader.weights)
    return reader.stores(weight) and not turned and (not _is_biased(module) or reader.stores(f"{name}.bias"))


def _is_biased(module: nn.Module) -> bool:
    return module.biased if isinstance(module, AwaitedLinear) else getattr(module, "bias", None) is not None
