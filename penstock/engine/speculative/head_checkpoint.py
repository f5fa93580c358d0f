"""The files of a drafter's head: safetensors, or the pickled tensors in which the first heads were published."""

from __future__ import annotations

import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.loading.checkpoint import SafetensorsCheckpoint, read_json
from penstock.engine.models.weights import Weights
from penstock.errors import CheckpointError

PICKLED = "pytorch_model.bin"


class PickledHead:
    """A small checkpoint in one pickled file. Read with PyTorch's restricted unpickler: tensors and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = read_json(folder / "config.json")
        path = folder / PICKLED
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
            raise CheckpointError(f"{path} does not hold named tensors")
        self._tensors: dict[str, Tensor] = loaded

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        return self._tensors[name].to(device)


def open_head(folder: Path) -> Weights:
    """The head in a folder."""
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} has no config.json")
    if (folder / PICKLED).exists() and not any(folder.glob("*.safetensors")):
        return PickledHead(folder)
    return SafetensorsCheckpoint(folder)
