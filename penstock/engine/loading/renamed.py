"""Checkpoints whose tensors have other names than the decoder built from them, and some that it does not have."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.models.wrappers import alone, senses
from penstock.errors import CheckpointError


class RenamedCheckpoint:
    """A folder under the names that `own_name` gives its tensors; where it gives none, the tensor is left out."""

    def __init__(self, inner: Any, own_name: Callable[[str], str | None]) -> None:
        self.inner = inner
        self.config: dict[str, Any] = inner.config
        self._stored: dict[str, str] = {}
        for name in inner.names():
            own = own_name(name)
            if own is None:
                continue
            other = self._stored.setdefault(own, name)
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


def decoder_name(name: str) -> str | None:
    """What a tensor of a multimodal checkpoint is called in one of its decoder alone, by which the `transformers`
    library knows it; None if it belongs to what sees or hears."""
    return None if senses(name) else alone(name)
