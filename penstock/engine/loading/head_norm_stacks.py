"""Checkpoints that store the norm of every head of queries and keys by itself, as one matrix for all of them.

`q_layernorm.norms.N.weight` of all heads N is read as `q_layernorm.weight`, [heads, head_dim].
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

_ONE = re.compile(r"(.*)\.norms\.(\d+)\.weight")


class HeadNormStacks:
    """See the top of the file. Other tensors are those of the inner checkpoint."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.config: dict[str, Any] = inner.config
        self._stacks: dict[str, dict[int, str]] = {}
        self._others: set[str] = set()
        for name in inner.names():
            one = _ONE.fullmatch(name)
            if one is None:
                self._others.add(name)
            else:
                self._stacks.setdefault(f"{one[1]}.weight", {})[int(one[2])] = name

    def names(self) -> Collection[str]:
        return self._others | self._stacks.keys()

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        stack = self._stacks.get(name)
        if stack is None:
            found: Tensor = self.inner.tensor(name, device)
            return found
        return torch.stack([self.inner.tensor(stack[head], device) for head in sorted(stack)])


def with_head_norms(checkpoint: Any) -> Any:
    """`checkpoint` with such matrices, where it has norms of single heads."""
    # A large checkpoint has a hundred thousand names.
    found = any(".norms." in name and _ONE.fullmatch(name) for name in checkpoint.names())
    return HeadNormStacks(checkpoint) if found else checkpoint
