"""Whether a checkpoint already holds its matrices as integers, and getting at them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from penstock.engine.config import WeightForm
from penstock.engine.loading.checkpoint import GGUFCheckpoint
from penstock.engine.loading.groups import IntGroups
from penstock.engine.loading.quantized import QuantizedCheckpoint
from penstock.engine.models.weights import Weights
from penstock.errors import CheckpointError

_BITS = {"int8": 8, "int4": 4}


def stores_groups(weights: Weights) -> bool:
    """Whether the checkpoint has matrices as groups of integers."""
    return isinstance(weights, GGUFCheckpoint | QuantizedCheckpoint)


def stored_groups(
    weights: Weights, names: dict[str, int], inputs: int, form: WeightForm, device: str | torch.device
) -> list[IntGroups] | None:
    """The integers of all the named matrices, when the checkpoint has them in the form that was asked for."""
    if not isinstance(weights, GGUFCheckpoint | QuantizedCheckpoint):
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


def row_peaks(weights: Weights, names: Iterable[str], device: str | torch.device) -> Tensor | None:
    """float32 [out]: the largest magnitude of every whole row, where `weights` has a part of each row's inputs. With
    it, what is rounded with a scale per row is rounded alike on any number of ranks."""
    find = getattr(weights, "row_peaks", None)
    if find is None:
        return None
    found = [find(name, device) for name in names]
    return None if any(part is None for part in found) else torch.cat(found)
