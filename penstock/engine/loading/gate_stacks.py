"""Checkpoints that store a layer's output gate, queries, keys and values as one matrix, each a quarter of its rows,
under the names of four (HRM-Text)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError

_STACK, _PARTS = "self_attn.gqkv_proj.weight", ("gate_proj", "q_proj", "k_proj", "v_proj")


class GateStacks:
    """See the top of the file. Other tensors are those of the inner checkpoint."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.config: dict[str, Any] = inner.config
        self._parts: dict[str, tuple[str, int]] = {}
        self._others = set()
        for name in inner.names():
            if not name.endswith(_STACK):
                self._others.add(name)
                continue
            at = f"{name.removesuffix(_STACK)}self_attn."
            self._parts |= {f"{at}{part}.weight": (name, index) for index, part in enumerate(_PARTS)}

    def names(self) -> Collection[str]:
        return self._others | self._parts.keys()

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        found: Tensor
        if name not in self._parts:
            found = self.inner.tensor(name, device)
            return found
        stack, index = self._parts[name]
        found = self.inner.tensor(stack)
        if found.dim() != 2 or len(found) % len(_PARTS):
            raise CheckpointError(f"tensor {stack!r} has shape {tuple(found.shape)}, not that of four equal matrices")
        return found.chunk(len(_PARTS))[index].contiguous().to(device)


def with_gates(checkpoint: Any) -> Any:
    """`checkpoint` with such matrices, where it has stacks of them."""
    return GateStacks(checkpoint) if any(name.endswith(_STACK) for name in checkpoint.names()) else checkpoint
