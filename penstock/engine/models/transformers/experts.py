"""The experts of a model of the `transformers` library on several shards: each shard has some of them, whole.

The library's modules hold the experts of a layer as stacked parameters and are called with tokens, the experts chosen
for each and their weights, whatever the model. A shard calls them with the pairs of token and expert that are its own.
Where all shards have all tokens, the parts are added up; where each has tokens of its own, these travel (`Shard`).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.models.transformers.body import Elsewhere, layers_of
from penstock.engine.models.transformers.cuts import Cuts, Shard, Span
from penstock.engine.models.transformers.dependencies import experts_of

log = logging.getLogger(__name__)


def experts_span(count: int, shard: Shard) -> Span:
    """The experts of a shard; their number need not be a multiple of the shards'."""
    return count * shard.index // shard.count, count * (shard.index + 1) // shard.count


def has_experts(base: nn.Module, layers: int) -> bool:
    """Whether some layer, of this stage or another, has experts that can be divided."""
    _, modules = layers_of(base, layers)
    return any(experts_of(layer._layer[0] if isinstance(layer, Elsewhere) else layer) for layer in modules)


@torch.inference_mode()
def find_experts(model: nn.Module, shard: Shard, family: str, close: float) -> dict[str, Span]:
    """The experts that a shard has of each module, by its name, of a model on the host. All shards call this together.
    `close`: how far the sum of the parts may be from the whole."""
    found = experts_of(model)
    fails: dict[type[nn.Module], bool] = {}
    for module in found.values():
        if type(module) not in fails:
            fails[type(module)] = not _parts_add_up(module, shard, close)
    if found and shard.any([any(fails.values())])[0]:
        log.warning("tensor_parallel: every shard has the experts of this %s model whole: parts differ", family)
        return {}
    return {name: experts_span(_count(module), shard) for name, module in found.items()}


def divide_experts(model: nn.Module, cuts: Cuts) -> None:
    """Keep this shard's experts only."""
    for name, span in cuts.experts.items():
        above, _, last = name.rpartition(".")
        holder: Any = model.get_submodule(above)
        module = getattr(holder, last)
        count = _count(module)
        _keep(module, span)
        setattr(holder, last, DividedExperts(module, span, count, cuts.shard))


class DividedExperts(nn.Module):
    """Stands for a module of experts of which a shard has some."""

    def __init__(self, inner: nn.Module, span: Span, count: int, shard: Shard) -> None:
        """`count`: of all shards."""
        super().__init__()
        self.inner = inner
        self._span = span
        self._shard = shard
        spans = [experts_span(count, Shard(index, shard.count, shard.sum, shard.agree)) for index in range(shard.count)]
        self._owners = torch.cat([torch.full((end - begin,), index) for index, (begin, end) in enumerate(spans)])

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self._shard.exchange is None:
            total = self._shard.sum(self._own(x, top_k_index, top_k_weights))
        else:
            if self._owners.device != x.device:
                self._owners = self._owners.to(x.device)
            total = self._shard.exchange(x, top_k_index, top_k_weights, self._owners[top_k_index], self._own)
        return total.view(hidden_states.shape)

    def _own(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """What this shard's experts add."""
        return own_experts(self.inner, self._span, x, index, weights)


def own_experts(inner: nn.Module, span: Span, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """`inner` has the experts of `span`; what they add to tokens x [T, hidden] with `index` and `weights` [T, k]."""
    begin, end = span
    total = torch.zeros_like(x)
    token, place = ((index >= begin) & (index < end)).nonzero(as_tuple=True)
    if len(token):
        chosen, factors = index[token, place], weights[token, place]
        part: Tensor = inner(x[token], (chosen - begin).unsqueeze(1), factors.unsqueeze(1))
        total.index_add_(0, token, part.to(x.dtype))
    return total


def _count(module: Any) -> int:
    count: int = module.num_experts
    return count


def _keep(module: Any, span: Span) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data[slice(*span)].clone()
    module.num_experts = span[1] - span[0]


def _parts_add_up(module: Any, shard: Shard, close: float) -> bool:
    """Whether what all shards would compute is what the whole does; tried here with each part in turn."""
    parameters = list(module.parameters())
    whole, count = [parameter.data for parameter in parameters], _count(module)
    seeded = torch.Generator().manual_seed(0)
    index = torch.stack([torch.randperm(count, generator=seeded)[: min(count, 4)] for _ in range(6)])
    weights = torch.rand(index.shape, generator=seeded).to(whole[0].dtype)
    try:
        for width in dict.fromkeys(size for value in whole for size in value.shape[1:]):
            x = torch.randn(6, width, generator=seeded).to(whole[0].dtype)
            try:
                expected = module(x, index, weights)
            except RuntimeError:  # not the width of its inputs
                continue
            total = torch.zeros_like(expected, dtype=torch.float32)
            for other in range(shard.count):
                span = experts_span(count, Shard(other, shard.count, shard.sum, shard.agree))
                for parameter, value in zip(parameters, whole, strict=True):
                    parameter.data = value[slice(*span)]
                module.num_experts = span[1] - span[0]
                total += own_experts(module, span, x, index, weights).float()
            return bool((total - expected.float()).norm() <= close * expected.float().norm())
        return False
    except Exception:  # whatever a module does with a part of its experts
        return False
    finally:
        module.num_experts = count
        for parameter, value in zip(parameters, whole, strict=True):
            parameter.data = value
