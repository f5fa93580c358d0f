"""A checkpoint of random numbers, for measuring speed without a download.

Any configuration of a supported family works: names and shapes are those that the family's composition reads. Every
tensor is a slice of one pool of random numbers, because drawing billions of them would take longer than the benchmark.
The same seed gives the same tensor whatever was asked for before.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.reference.backend import ReferenceBackend
from penstock.engine.backends.reference.linear import DenseLinear
from penstock.engine.loading.mxfp4 import Mxfp4
from penstock.engine.models.build import compose_decoder
from penstock.engine.models.families import HFConfig, family_of, read_config
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.weights import WeightReader
from penstock.errors import CheckpointError

POOL = 4_194_301
"""Numbers in the pool: a prime, so that rows of any usual length do not repeat."""


class RandomCheckpoint:
    """Weights that keep activations in range: norms are one, matrices are scaled by their fan-in."""

    def __init__(
        self,
        config: dict[str, Any],
        seed: int = 0,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        embedding_scale: float = 0.02,
    ) -> None:
        """`embedding_scale`: spread of the embeddings. Layers add about one each to what they read; where embeddings
        are a thousand times that, what comes next depends on the last token alone, and no rounding changes it."""
        self.embedding_scale = embedding_scale
        self.config = config
        self.seed = seed
        self.device = device
        self.dtype = dtype
        model = read_config(config)
        reader = _composed(model)
        self.shapes = reader.shapes
        self._norms = dict.fromkeys(reader.norms, 1.0 - model.norm_offset)
        self._norms |= dict.fromkeys(reader.unshifted_norms, 1.0)
        self._tables, self._experts = reader.tables, 1 if model.moe is None else model.moe.experts
        names = family_of(model.family).names
        self._embedding = f"{names.prefix}{names.embedding}.weight"
        self._pools: dict[torch.device, Tensor] = {}

    def names(self) -> Collection[str]:
        return self.shapes.keys()

    def tensor(self, name: str, device: str | torch.device | None = None) -> Tensor:
        shape = self.shapes.get(name)
        if shape is None:
            raise CheckpointError(f"a {self.config.get('model_type')} model has no tensor {name!r}")
        where = torch.device(self.device if device is None else device)
        packed = self.mxfp4(name, where)
        if packed is not None:
            return packed.dense().to(self.dtype)
        if name in self._tables:  # each token visits neighbours
            tokens, choices = (torch.arange(size, device=where) for size in shape)
            return (tokens.unsqueeze(1) + choices) % self._experts
        if name in self._norms:
            return torch.full(shape, self._norms[name], dtype=self.dtype, device=where)
        scale = 0.02 if len(shape) == 1 else 1 / math.sqrt(shape[-1])
        if name == self._embedding:
            scale = self.embedding_scale
        start, size = zlib.crc32(name.encode()) % POOL, math.prod(shape)
        pool = self._pool(where)
        if start + size > POOL:
            pool = pool.repeat(-(-(start + size) // POOL))
        numbers = pool[start : start + size]
        return numbers.mul(scale).reshape(shape)  # in memory of its own: kernels read faster what is aligned

    def mxfp4(self, name: str, device: str | torch.device | None = None) -> Mxfp4 | None:
        """Experts in MXFP4, where the configuration says so; None for any other tensor."""
        method = (self.config.get("quantization_config") or {}).get("quant_method")
        if method != "mxfp4" or ".experts." not in name or not name.endswith(".weight"):
            return None
        out, inputs = self.shapes[name]
        where = torch.device(self.device if device is None else device)
        generator = torch.Generator(where).manual_seed(self.seed + zlib.crc32(name.encode()))
        blocks = torch.randint(256, (out, inputs // 2), dtype=torch.uint8, device=where, generator=generator)
        # The values of random codes spread over 2.9 times their power of two.
        exponent = 127 - round(math.log2(2.9 * math.sqrt(inputs)))
        return Mxfp4(blocks, torch.full((out, inputs // 32), exponent, dtype=torch.uint8, device=where))

    def _pool(self, device: torch.device) -> Tensor:
        if device not in self._pools:
            generator = torch.Generator(device).manual_seed(self.seed)
            numbers = torch.randn(POOL, device=device, dtype=torch.float32, generator=generator)
            self._pools[device] = numbers.to(self.dtype)
        return self._pools[device]


def tensor_shapes(config: HFConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor of a decoder with this configuration: those that its composition asks for."""
    return _composed(read_config(config)).shapes


def stored_elements(config: HFConfig) -> int:
    """Of all its tensors."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def possible_tensors(config: HFConfig) -> set[str]:
    """Every name that a decoder of this configuration may read: parts that run as one may be stored so or apart."""
    model = read_config(config)
    names = {"lm_head.weight"}
    for fused in (False, True):
        names |= _composed(model, fused).shapes.keys()
    return names


def _composed(model: ModelConfig, fused: bool | None = None) -> ShapeReader:
    reader = ShapeReader(model, fused)
    compose_decoder(reader, model, max_positions=1)
    return reader


class ShapeReader(WeightReader):
    """Records what is read, and reads nothing."""

    def __init__(self, model: ModelConfig, fused: bool | None = None) -> None:
        """`fused`: whether parts that run as one are stored so; None: as the family does."""
        self.names = set() if model.tied_embeddings else {"lm_head.weight"}
        self.backend = ReferenceBackend()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.norms: set[str] = set()
        self.unshifted_norms: set[str] = set()
        self.tables: set[str] = set()
        """Of experts, by the ids of tokens."""
        self._fused = family_of(model.family).names.fused if fused is None else fused
        self._other = fused is True
        self._nothing = torch.empty(0)
        self.made = {}
        self._quantize = None
        self._dtype = torch.float32

    def stores(self, name: str) -> bool:
        return self._other  # the second way, where `possible_tensors` asks for all

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        self.shapes[name] = shape
        if dtype is torch.int64:
            self.tables.add(name)
        return torch.empty(shape, device="meta")

    def as_stored(self, name: str, *shape: int) -> Tensor:
        return self.get(name, *shape)

    def host_rows(self, name: str, rows: int, width: int, parts: int) -> list[Tensor]:
        return [self.get(f"{name}.weight", rows, width)]

    def row(self, name: str, size: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.get(name, size)

    def number(self, name: str, *shape: int) -> float:
        self.shapes[name] = shape
        return 0.0

    def unshifted(self, name: str, size: int) -> Tensor:
        self.unshifted_norms.add(f"{name}.weight")
        return self.get(f"{name}.weight", size)

    def ones(self, size: int) -> Tensor:
        return self._nothing

    def norm(self, name: str, *shape: int) -> Tensor:
        self.norms.add(f"{name}.weight")
        return self.get(f"{name}.weight", *shape)

    def linear(
        self, at: str, parts: dict[str, int], inputs: int, bias: bool = False, fused: str = "", biased: str = ""
    ) -> Linear:
        if fused and self._fused:
            parts = {fused: sum(parts.values())}
        for part, size in parts.items():
            self.shapes[f"{at}{part}.weight"] = (size, inputs)
            if bias:
                self.shapes[f"{at}{biased or part}.bias"] = (size,)
        return DenseLinear(self._nothing, None)
