"""OFT: inputs of linears are turned, block by block, by rotations that are stored as numbers above a diagonal.

Such numbers are a skew-symmetric matrix Q. The rotation, by which rows of inputs are multiplied from the right, is what
PEFT makes of it: the first terms of the series of (I + Q) (I - Q)^-1, or exactly (I - Q) (I + Q)^-1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.engine.adapters.input_tensors import BLOCKS
from penstock.engine.adapters.kinds.modules import Converted, Module, Tensors, modules_of
from penstock.engine.adapters.kinds.renamed import check_targets
from penstock.engine.adapters.layout import AdapterLayout
from penstock.engine.adapters.peft_config import LoraConfig
from penstock.engine.adapters.spec import CONFIG, WEIGHTS
from penstock.engine.loading.keys import KeyRules
from penstock.errors import CheckpointError

_NAME = "oft_R"


@dataclass(frozen=True, slots=True)
class Rotations:
    """See `kinds.read_settings` and `kinds.as_lora`."""

    title: str
    rules: KeyRules

    def settings(self, raw: Mapping[str, Any]) -> LoraConfig:
        terms, eps = raw.get("num_cayley_neumann_terms", 5), raw.get("eps", 6e-5)
        if not isinstance(terms, int) or isinstance(terms, bool) or not 1 <= terms <= 100:
            raise CheckpointError(f"{CONFIG}: num_cayley_neumann_terms must be 1 to 100, found {terms!r:.80}")
        if not isinstance(eps, int | float) or isinstance(eps, bool) or not 0 < eps < 1e30:
            raise CheckpointError(f"{CONFIG}: eps must be a number above 0, found {eps!r:.80}")
        for key in ("coft", "block_share", "use_cayley_neumann"):
            if raw.get(key) not in (True, False, None):
                raise CheckpointError(f"{CONFIG}: {key} must be true or false, found {raw[key]!r:.80}")
        return LoraConfig.of_kind(raw, self.title)

    def convert(
        self, raw: Mapping[str, Any], settings: LoraConfig, tensors: Tensors, layout: AdapterLayout
    ) -> tuple[LoraConfig, Tensors]:
        modules, others = modules_of(tensors, (_NAME,), layout)
        check_targets(modules, settings, layout)
        made: dict[str, Callable[[], Tensor]] = {
            f"{module.key}.{BLOCKS}": partial(_blocks, module, raw) for module in modules
        }
        return replace(settings, ranks={}), Converted(tensors, others, made)


def _blocks(module: Module, raw: Mapping[str, Any]) -> Tensor:
    """float32 [blocks, size, size], which inputs are multiplied by from the left."""
    _, inputs = module.model_shape()
    stored = module.tensor(_NAME, None, None)
    size = (1 + math.isqrt(1 + 8 * stored.shape[1])) // 2
    shared = bool(raw.get("block_share", False))
    count = inputs // size
    if size * (size - 1) // 2 != stored.shape[1] or count * size != inputs or len(stored) != (1 if shared else count):
        raise CheckpointError(
            f"{WEIGHTS}: {module.path}.{_NAME} is {tuple(stored.shape)}, which are no rotations of {inputs} inputs"
        )
    rows, columns = torch.triu_indices(size, size, 1)
    skew = torch.zeros(len(stored), size, size)
    skew[:, rows, columns] = stored
    skew = skew - skew.transpose(1, 2)
    if raw.get("coft", False):
        most = raw.get("eps", 6e-5) / math.sqrt(len(stored))
        lengths = skew.norm(dim=(1, 2), keepdim=True)
        skew = torch.where(lengths <= most, skew, most * skew / lengths.clamp(min=1e-30))
    one = torch.eye(size).expand_as(skew)
    if raw.get("use_cayley_neumann", True):
        turned = _series(one, skew, raw.get("num_cayley_neumann_terms", 5))
    else:
        turned = torch.linalg.solve(one + skew, one - skew, left=False)
    return turned.transpose(1, 2).expand(count, size, size).contiguous()


def _series(one: Tensor, skew: Tensor, terms: int) -> Tensor:
    """I + 2 Q + 2 Q^2 + ..., the last power once, as PEFT ends it: with Q^3 where there are three terms, too."""
    if terms < 3:
        return one if terms == 1 else one + 2 * skew
    last = max(3, terms - 1)
    total, power = one + 2 * skew, skew
    for exponent in range(2, last + 1):
        power = power @ skew
        total = total + (1 if exponent == last else 2) * power
    return total
