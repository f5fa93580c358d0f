"""Checkpoints whose tensors have other names than the family's."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError


class RenamedCheckpoint:
    """A folder under the names that `own_name` gives its tensors."""

    def __init__(self, inner: Any, own_name: Callable[[str], str]) -> None:
        self.inner = inner
        self.config: dict[str, Any] = inner.config
        self._stored: dict[str, str] = {}
        for name in inner.names():
            other = self._stored.setdefault(own_name(name), name)
            if other != name:
                raise CheckpointError(f"{self.folder} has {name!r} and {other!r}, which are the same tensor")

    @property
    def folder(self) -> Path:
        folder: Path = self.inner.folder
        return folder

    def names(self) -> Collection[str]:
        return self._stored.keys()

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        stored = self._stored.get(name)
        if stored is None:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}")
        found: Tensor = self.inner.tensor(stored, device)
        return found
