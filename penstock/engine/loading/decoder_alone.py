"""A multimodal checkpoint under the names that its decoder has alone: for decoders of the `transformers` library, which
knows them by those. Tensors of what sees or hears are left out."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.models.wrappers import alone, senses


class DecoderAlone:
    """See the top of the file."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.folder: Path = inner.folder
        self.config: dict[str, Any] = inner.config
        self._stored = {alone(name): name for name in inner.names() if not senses(name)}

    def names(self) -> Collection[str]:
        return self._stored.keys()

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        found: Tensor = self._inner.tensor(self._stored.get(name, name), device)
        return found
