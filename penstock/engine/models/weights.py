"""Tensors of a checkpoint as a model's composition asks for them: by name, checked, stacked, and on the device."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from copy import copy
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.backends.interface import KVScales
from penstock.engine.loading.fp8 import Fp8Checkpoint
from penstock.engine.loading.quantized import QuantizedCheckpoint
from penstock.engine.models.layers.factory import LayerFactory
from penstock.engine.models.layers.linear import Linear
from penstock.errors import CheckpointError


class Weights(Protocol):
    """What a reader needs of a checkpoint; see `penstock.engine.loading`."""

    @property
    def config(self) -> dict[str, Any]: ...

    def names(self) -> Collection[str]: ...

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor: ...


class Quantizer(Protocol):
    """Makes one linear layer of the named matrices in few bits, or None when it cannot."""

    def __call__(self, weights: Weights, names: dict[str, int], inputs: int, bias: Tensor | None) -> Linear | None: ...


_log = logging.getLogger(__name__)


def of_ends(names: Iterable[str]) -> bool:
    """Whether these matrices are a head, which may be the embedding."""
    return any("lm_head" in name or "embed_tokens" in name or "embeddings." in f"{name}." for name in names)


class WeightReader:
    """Reads the tensors of one decoder."""

    def __init__(
        self,
        weights: Weights,
        backend: LayerFactory,
        dtype: torch.dtype,
        quantize: Quantizer | None = None,
        norm_offset: float = 0.0,
        asked: str = "",
    ) -> None:
        """`norm_offset`: added to all norm weights. `asked`: the form in which a user wants linears; those that stay
        dense nevertheless are logged."""
        self.names = set(weights.names())
        self.backend = backend
        self.weights = weights
        self._dtype = dtype
        self._quantize = quantize
        self._norm_offset = norm_offset
        self._asked = asked
        self._told: set[str] = set()
        self.made: dict[str, Any] = {}
        """What compositions keep for later, of layers that a model has more than once."""

    def dense(self) -> WeightReader:
        """The same, making dense linears only."""
        reader = copy(self)
        # Deterministic mode has dense linears of its own.
        reader._quantize = getattr(self._quantize, "widened", None)
        return reader

    @property
    def all_dense(self) -> bool:
        """Whether linears are made as the checkpoint's numbers are."""
        return self._quantize is None

    def stores(self, name: str) -> bool:
        """Whether the checkpoint has that tensor, for what may be stored in one way or another."""
        return name in self.names

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        if name not in self.names:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}; it is incomplete or of another family")
        tensor = self.weights.tensor(name, self.backend.device)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the configuration says {shape}")
        return tensor.to(device=self.backend.device, dtype=dtype or self._dtype)

    def as_stored(self, name: str, *shape: int) -> Tensor:
        """In its own type: what is looked up, and never computed with as a whole. Not in a wider one than is computed
        in, as which quantized tensors of GGUF files are read."""
        own = self.weights.tensor(name).dtype if name in self.names else None
        return self.get(name, *shape, dtype=None if own is not None and own.itemsize > self._dtype.itemsize else own)

    def host_rows(self, name: str, rows: int, width: int, parts: int) -> list[Tensor]:
        """A table too large for the device, in its own type and where it is in host memory: `name`.weight, or its
        `parts` runs of rows, which are all as long but for the last."""
        stored = [f"{name}.weight"]
        if stored[0] not in self.names:
            stored = [f"{name}.shard_{part}.weight" for part in range(parts)]
        found = []
        for part in stored:
            if part not in self.names:
                raise CheckpointError(f"the checkpoint has no tensor {part!r}; it is incomplete or of another family")
            found.append(self.weights.tensor(part, "cpu"))
        sizes = [len(part) if part.dim() == 2 and part.shape[1] == width else -1 for part in found]
        if sum(sizes) != rows or any(size != sizes[0] for size in sizes[:-1]) or not 0 <= sizes[-1] <= sizes[0]:
            shapes = ", ".join(map(str, dict.fromkeys(tuple(part.shape) for part in found)))
            raise CheckpointError(
                f"{len(found)} tensors of {name!r} have shapes {shapes}, the configuration says {rows} rows of {width}"
            )
        return found

    def row(self, name: str, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """A vector, which some checkpoints store as a matrix of one row."""
        one_row = name in self.names and self.weights.tensor(name).ndim == 2
        return self.get(name, *((1, size) if one_row else (size,)), dtype=dtype).view(size)

    def number(self, name: str, *shape: int) -> float:
        """One number, on the host."""
        return float(self.get(name, *shape, dtype=torch.float32))

    def touch(self, prefix: str) -> None:
        """Read tensors and forget them, so that they are in memory when they are wanted."""
        for name in self.names:
            if name.startswith(prefix):
                self.weights.tensor(name)

    def zeros(self, *shape: int) -> Tensor:
        """In place of what this process never uses, so that warm-up needs no special case."""
        return torch.zeros(shape, dtype=self._dtype, device=self.backend.device)

    def ones(self, size: int) -> Tensor:
        """In place of norm weights that a family does not have."""
        return torch.ones(size, dtype=self._dtype, device=self.backend.device)

    def norm(self, name: str, *shape: int) -> Tensor:
        """Norm weights; with an offset they stay float32, since one plus a small number would lose its digits."""
        if not self._norm_offset:
            return self.get(f"{name}.weight", *shape)
        return self.get(f"{name}.weight", *shape, dtype=torch.float32) + self._norm_offset

    def layer_norm(self, at: str, name: str, size: int, bias: bool) -> tuple[Tensor, Tensor | None]:
        """Gains and biases of a norm `at + name`; without a name it has no weights."""
        if not name:
            return self.ones(size), None
        return self.norm(at + name, size), self.get(f"{at}{name}.bias", size) if bias else None

    def unshifted(self, name: str, size: int) -> Tensor:
        """Norm weights that are stored as they are also where others have an offset; float32."""
        return self.get(f"{name}.weight", size, dtype=torch.float32)

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations."""
        return self._dtype

    def linear(
        self, at: str, parts: dict[str, int], inputs: int, bias: bool = False, fused: str = "", biased: str = ""
    ) -> Linear:
        """Matrices `at + part` of the given output sizes, stacked into one linear; or `at + fused`, where the
        checkpoint has them stacked already. `biased`: whose bias it has, where that is of another module."""
        if fused and f"{at}{fused}.weight" in self.names:
            parts = {fused: sum(parts.values())}
        biases = [self.get(f"{at}{biased or part}.bias", size) for part, size in parts.items()] if bias else None
        stacked_bias = torch.cat(biases) if biases else None
        names = {f"{at}{part}.weight": size for part, size in parts.items()}
        if self._quantize is not None and self.names.issuperset(names):
            quantized = self._quantize(self.weights, names, inputs, stacked_bias)
            if quantized is not None:
                return quantized
            if not of_ends(names):  # a head stays dense in some forms
                self._tell_dense(next(iter(names)), inputs)
        dense = torch.cat([self.get(name, size, inputs) for name, size in names.items()])
        return self.backend.linear(dense, stacked_bias)

    def _tell_dense(self, name: str, inputs: int) -> None:
        """Once for the same matrix of all layers."""
        module = name.removesuffix(".weight").rpartition(".")[2]
        if self._asked and module not in self._told:
            self._told.add(module)
            _log.warning(
                "%s and those like it are dense, not %s: there are no kernels for %d inputs", name, self._asked, inputs
            )

    def kv_scales(self, attention: str, kv_heads: int) -> KVScales:
        """The checkpoint's own scales for an FP8 cache, or 1: e4m3 reaches 448 and keeps three bits at any size."""
        checkpoint, device = self.weights, self.backend.device
        k, v = 1.0, 1.0
        if isinstance(checkpoint, Fp8Checkpoint | QuantizedCheckpoint):
            k, v = checkpoint.kv_scale(attention)
        return torch.full((kv_heads,), k, device=device), torch.full((kv_heads,), v, device=device)
