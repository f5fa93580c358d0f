"""Where states lie, as inputs of captured steps: the fields of `StateBatch` at fixed addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from penstock.engine.backends.interface import StateBatch
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.decoder import Decoder

View = Callable[[str, torch.dtype], Tensor]
"""Finds an input of a step by name."""
STATE_FIELDS = tuple((f"state_{name}", np.int32) for name in ("first", "last", "reads", "writes"))
"""Names and types, in the order of `StateBatch`."""


def steps_have_states(decoder: Decoder, kv: KVCache) -> bool:
    """Whether steps come with states: on every rank, also on one that has no recurrent layer."""
    return decoder.config.recurrent or not kv.shape.blocks_suffice


def by_name(states: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """The values of the fields, in their order."""
    return {name: array for (name, _), array in zip(STATE_FIELDS, states, strict=True)}


def state_batch(view: View) -> StateBatch:
    """The same on the device, inside a captured step."""
    return StateBatch(*(view(name, torch.int32) for name, _ in STATE_FIELDS))
