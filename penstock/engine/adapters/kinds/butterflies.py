"""BOFT: inputs of linears are turned by a product of sparse rotations, a butterfly, and outputs are scaled.

Every factor of a butterfly turns blocks of inputs, the first neighbours and each further one inputs that lie twice as
far apart. Their product is a rotation of larger blocks, which is what OFT has (`kinds.rotations`): of the size of one
block for a single factor, and twice as large with each more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.engine.adapters.input_tensors import BLOCKS
from penstock.engine.adapters.kinds import rules
from penstock.engine.adapters.kinds.modules import Converted, Module, Tensors, modules_of
from penstock.engine.adapters.kinds.renamed import check_targets
from penstock.engine.adapters.layout import AdapterLayout
from penstock.engine.adapters.peft_config import LoraConfig
from penstock.engine.adapters.spec import WEIGHTS
from penstock.engine.adapters.vector_tensors import SCALE
from penstock.engine.loading.keys import KeyRules
from penstock.errors import CheckpointError

_TURNS, _SCALES = "boft_R", "boft_s"
_MOST = 2048
"""Inputs in a block: a larger one takes more memory than the matrix that it turns."""


@dataclass(frozen=True, slots=True)
class Butterflies:
    """See `kinds.read_settings` and `kinds.as_lora`."""

    title: str = "BOFT"
    rules: KeyRules = rules.BOFT

    def settings(self, raw: Mapping[str, Any]) -> LoraConfig:
        return LoraConfig.of_kind(raw, self.title)

    def convert(
        self, raw: Mapping[str, Any], settings: LoraConfig, tensors: Tensors, layout: AdapterLayout
    ) -> tuple[LoraConfig, Tensors]:
        modules, others = modules_of(tensors, (_TURNS, _SCALES), layout)
        check_targets(modules, settings, layout)
        made: dict[str, Callable[[], Tensor]] = {}
        for module in modules:
            made[f"{module.key}.{BLOCKS}"] = partial(_blocks, module)
            made[f"{module.key}.{SCALE}"] = partial(_scales, module)
        return replace(settings, ranks={}), Converted(tensors, others, made)


def _scales(module: Module) -> Tensor:
    outputs, _ = module.model_shape()
    return module.tensor(_SCALES, outputs, 1).flatten()


def _blocks(module: Module) -> Tensor:
    """float32 [blocks, size, size], which inputs are multiplied by from the left."""
    _, inputs = module.model_shape()
    stored = module.tensor(_TURNS, None, None, None, None)
    factors, count, side, other = stored.shape
    size = side << (factors - 1) if 1 <= factors <= 16 else 0
    if side != other or count * side != inputs or not 0 < size <= _MOST or inputs % size or (factors > 1 and side % 2):
        raise CheckpointError(
            f"{WEIGHTS}: {module.path}.{_TURNS} is {tuple(stored.shape)}, which is no rotation of {inputs} inputs in "
            f"blocks of at most {_MOST}"
        )
    skew = 0.5 * (stored - stored.transpose(-1, -2))
    one = torch.eye(side).expand_as(skew)
    turns = torch.linalg.solve(one + skew, one - skew, left=False)
    total = torch.eye(size).expand(inputs // size, size, size)
    for factor in range(factors):
        whole = torch.zeros(inputs // size, size // side, side, size // side, side)
        places = torch.arange(size // side)
        whole[:, places, :, places] = turns[factor].view(-1, size // side, side, side).transpose(0, 1)
        whole = whole.view(-1, size, size)
        order = _order(size, side << factor, side // 2) if factors > 1 else torch.arange(size)
        total = whole[:, order][:, :, order] @ total
    return total.transpose(1, 2).contiguous()


def _order(size: int, span: int, half: int) -> Tensor:
    """Which inputs a factor's blocks turn: in every `span` of them, runs of `half` in even places, then in odd ones."""
    runs = torch.arange(size).view(-1, span // half, half)
    return torch.cat((runs[:, 0::2], runs[:, 1::2]), dim=1).flatten()
