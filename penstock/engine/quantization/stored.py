"""Whether a checkpoint already holds its matrices as integers, and getting at them."""

from __future__ import annotations

import torch

from penstock.engine.config import WeightForm
from penstock.engine.loading.checkpoint import GGUFCheckpoint
from penstock.engine.loading.groups import IntGroups
from penstock.engine.loading.quantized import QuantizedCheckpoint
from penstock.engine.models.weights import Weights
from penstock.errors import CheckpointError

_BITS = {"int8": 8, "int4": 4}


def stored_groups(
    weights: Weights, names: dict[str, int], inputs: int, form: WeightForm, device: str | torch.device
) -> list[IntGroups] | None:
    """The integers of all the named matrices, when the checkpoint has them in the form that was asked for."""
    if not isinstance(weights, (GGUFCheckpoint, QuantizedCheckpoint)):
        return None
    found = []
    for name, size in names.items():
        groups = weights.groups(name, device)
        if groups is None or _BITS.get(form, groups.bits) != groups.bits:
            return None
        if groups.shape != (size, inputs):
            raise CheckpointError(f"tensor {name!r} has shape {groups.shape}, the configuration says {(size, inputs)}")
        found.append(groups)
    return found
