"""Checkpoints: a model's configuration and weights, whatever file format they are stored in.

A `Checkpoint` uses Hugging Face's names: `config` has the keys of `config.json`, tensors have the names the reference
implementation gives them. Tensors are read one at a time, when asked for, so a loader's peak memory is its own.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.engine.backends.host_memory import is_host
from penstock.engine.loading.dequantize import dequantize
from penstock.engine.loading.gate_stacks import with_gates
from penstock.engine.loading.gguf import GGMLType, GGUFFile, RawTensor, gguf_in
from penstock.engine.loading.gguf_config import config_from_gguf, gguf_family
from penstock.engine.loading.gguf_names import join_latent_parts, origins, raw_of
from penstock.engine.loading.groups import IntGroups, from_gguf
from penstock.engine.loading.head_norm_stacks import with_head_norms
from penstock.engine.loading.mxfp4 import Mxfp4, from_gguf_blocks
from penstock.engine.loading.parallel import ParallelReader
from penstock.engine.loading.quantized import read_quantized
from penstock.engine.loading.renamed import RenamedCheckpoint, decoder_name
from penstock.engine.loading.stacked_experts import StackedExperts
from penstock.engine.loading.text_experts import as_family
from penstock.engine.models.families import FAMILIES, text_config
from penstock.engine.models.wrappers import WRAPPERS
from penstock.errors import CheckpointError

INDEX = "model.safetensors.index.json"


class Checkpoint(Protocol):
    """A model's configuration and weights."""

    config: dict[str, Any]

    def names(self) -> Collection[str]:
        """The tensors there are, under their Hugging Face names."""
        ...

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        """One dense tensor on `device`: as stored if it is a float type, float32 if it was quantized. On the
        CPU it may be a view of the file: copy before writing."""
        ...


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a folder with `config.json` and safetensors files, a GGUF file, or a folder holding one GGUF file."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    gguf = gguf_in(path)
    if gguf is not None:
        return GGUFCheckpoint(gguf)
    if path.is_file():
        raise CheckpointError(f"{path} is not a checkpoint: give a .gguf file or a folder with config.json")
    folder = SafetensorsCheckpoint(path)
    family = FAMILIES.get(str(text_config(folder.config).get("model_type")))
    if family is None:
        wrapped = str(folder.config.get("model_type")) in WRAPPERS
        return read_quantized(RenamedCheckpoint(folder, decoder_name) if wrapped else folder)
    named = folder if family.own_name is None else with_gates(RenamedCheckpoint(folder, family.own_name))
    checkpoint = read_quantized(with_head_norms(as_family(named, family.names)))
    return StackedExperts(checkpoint, family.names) if family.names.stacked_experts else checkpoint


class GGUFCheckpoint:
    """A GGUF file under Hugging Face names."""

    def __init__(self, path: str | Path) -> None:
        self.file = GGUFFile(path)
        self.config = config_from_gguf(self.file)
        self._origins = origins(self.file, gguf_family(self.file), self.config)

    def names(self) -> Collection[str]:
        return self._origins.keys()

    def refuse_others(self, possible: Collection[str]) -> None:
        """CheckpointError where the file holds a tensor that is not among `possible`, those that its model may read: it
        changes what llama.cpp computes, and would be left out. Layers that draft (MTP) may be there."""
        layers = self.config["num_hidden_layers"]
        drafting = tuple(
            f"model.layers.{layers + further}." for further in range(self.config.get("num_nextn_predict_layers", 0))
        )
        stray = [
            origin.name
            for name, origin in self._origins.items()
            if name not in possible and not (drafting and name.startswith(drafting))
        ]
        if stray:
            raise CheckpointError(
                f"{self.file.path}: a {self.config['model_type']} model has no use for {stray[0]!r}"
                f"{f' and {len(stray) - 1} others' if len(stray) > 1 else ''}; what that changes cannot be applied"
            )

    def raw(self, name: str) -> RawTensor:
        """The stored bytes of a tensor, rows already in Hugging Face order."""
        origin = self._origins.get(name)
        if origin is None:
            raise CheckpointError(f"{self.file.path} has no tensor for {name!r}")
        return raw_of(self.file, origin)

    def groups(self, name: str, device: str | torch.device = "cpu") -> IntGroups | None:
        """The integers of a matrix that is stored as such, None for any other tensor."""
        origin = self._origins[name]
        return None if origin.offset or origin.values else from_gguf(self.raw(name), device)

    def mxfp4(self, name: str, device: str | torch.device = "cpu") -> Mxfp4 | None:
        """A matrix as stored; None where it is not in MXFP4."""
        raw = self.raw(name)
        if raw.type is not GGMLType.MXFP4 or len(raw.shape) != 2 or self._origins[name].values:
            return None
        return from_gguf_blocks(torch.from_numpy(raw.data).to(device), raw.shape[0])

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        dense = _dense(self.raw(name), device)
        origin = self._origins[name]
        if origin.values:
            return join_latent_parts(dense, _dense(self.file.raw(origin.values), device))
        return dense + origin.offset if origin.offset else dense


def _dense(raw: RawTensor, device: str | torch.device) -> Tensor:
    return dequantize(torch.from_numpy(raw.data).to(device), raw.type, raw.shape)


class SafetensorsCheckpoint:
    """A folder with `config.json` and one or more safetensors files."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config: dict[str, Any] = read_json(self.folder / "config.json")
        self._files: dict[Path, Any] = {}
        self._reader: ParallelReader | None = None
        self._where = self._indexed() if (self.folder / INDEX).exists() else self._listed()

    def _indexed(self) -> dict[str, Path]:
        weight_map = read_json(self.folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self.folder / INDEX} has no weight_map; fetch the file again")
        where = {}
        missing = set()
        for name, file in weight_map.items():
            where[name] = self.folder / Path(str(file)).name
            if not where[name].exists():
                missing.add(where[name].name)
        if missing:
            raise CheckpointError(
                f"{self.folder} is incomplete: {INDEX} names {', '.join(sorted(missing))}, which "
                f"{'is' if len(missing) == 1 else 'are'} not there; fetch the model again"
            )
        present = {path: set(self._open(path).keys()) for path in set(where.values())}
        for name, path in where.items():
            if name not in present[path]:
                raise CheckpointError(f"{path} does not hold {name!r}, though {INDEX} says so; fetch the model again")
        return where

    def _listed(self) -> dict[str, Path]:
        single = self.folder / "model.safetensors"
        files = [single] if single.exists() else sorted(self.folder.glob("*.safetensors"))
        if not files:
            others = [*self.folder.glob("*.bin"), *self.folder.glob("*.pt"), *self.folder.glob("*.pth")]
            hint = "; its weights are pickled: convert them to safetensors first" if others else ""
            raise CheckpointError(f"{self.folder} holds no safetensors or GGUF weights{hint}")
        where: dict[str, Path] = {}
        for file in files:
            for name in self._open(file).keys():  # noqa: SIM118 - a safetensors handle is not a mapping
                if name in where:
                    raise CheckpointError(f"{name!r} is in both {where[name].name} and {file.name} of {self.folder}")
                where[name] = file
        return where

    def _open(self, file: Path) -> Any:
        handle = self._files.get(file)
        if handle is None:
            try:
                handle = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{file} is damaged or incomplete ({error}): delete it and fetch it again"
                ) from error
            self._files[file] = handle
        return handle

    def names(self) -> Collection[str]:
        return self._where.keys()

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        file = self._where.get(name)
        if file is None:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}")
        if not is_host(torch.device(device)):
            return self._read_ahead(torch.device(device)).tensor(name)
        try:
            tensor: Tensor = self._open(file).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file}: {name!r} cannot be read ({error}); fetch the file again") from error
        return tensor.to(device)

    def begin(self, device: torch.device) -> None:
        """Begin to read what will be asked for on a device, where it has memory of its own."""
        if not is_host(device):
            self._read_ahead(device).begin()

    def end(self) -> None:
        """What is asked for from now on is read by itself."""
        if self._reader is not None:
            self._reader.end()

    def _read_ahead(self, device: torch.device) -> ParallelReader:
        if self._reader is None or self._reader.device != device:
            self._reader = ParallelReader(set(self._where.values()), device)
        return self._reader


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a `CheckpointError` that names the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is not a checkpoint: it has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value
