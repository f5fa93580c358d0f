"""A BERT encoder on packed texts: embeddings, then layers of attention and MLP, each followed by its norm.

All texts of a batch lie one after the other along a single axis, shortest first, so linears and norms compute no
padding. Attention is one call for every group of texts of the same length, which are neighbours and therefore a view
of the packed tensor; on CUDA it is one call for all of them, told where each text begins, where torch has that.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.encoder.config import EncoderShape
from penstock.engine.loading.checkpoint import Checkpoint
from penstock.errors import CheckpointError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W + b with W [in, out]: stored transposed, because CPU libraries would transpose it at every call."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Tensor
    bias: Tensor


Product = Callable[[Tensor], Tensor]
"""[tokens, in] to [tokens, out]."""
MakeProduct = Callable[[Tensor, Tensor], Product]
"""From W [out, in] and b."""


def dense(weight: Tensor, bias: Tensor) -> Product:
    return Linear(weight.t().contiguous(), bias)


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    qkv: Product
    out: Product
    attention_norm: Norm
    up: Product
    down: Product
    output_norm: Norm


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """A cross-encoder's: the first token's state through the pooler to one number."""

    pooler: Product
    classifier: Product

    def __call__(self, first: Tensor) -> Tensor:
        return self.classifier(torch.tanh(self.pooler(first))).squeeze(-1)


@dataclass(frozen=True, slots=True)
class Packed:
    """A batch on its way through the layers. Texts are ordered by length."""

    tokens: Tensor
    positions: Tensor
    segments: Tensor
    lengths: list[int]
    starts: Tensor
    """Where each text begins, and the end of the last one."""

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], seconds: Sequence[int | None], device: torch.device) -> Packed:
        lengths = [len(text) for text in texts]
        flat = torch.tensor([token for text in texts for token in text])
        positions = torch.cat([torch.arange(length) for length in lengths])
        segments = torch.zeros_like(flat)
        start = 0
        for length, second in zip(lengths, seconds, strict=True):
            if second is not None:
                segments[start + second : start + length] = 1
            start += length
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        return cls(flat.to(device), positions.to(device), segments.to(device), lengths, starts.to(device))

    def groups(self) -> list[tuple[int, int, int]]:
        """(start, number of texts, length) of each run of texts that are equally long."""
        found, start = [], 0
        for length, run in itertools.groupby(self.lengths):
            count = len(list(run))
            found.append((start, count, length))
            start += count * length
        return found


class Encoder:
    """The weights and the forward pass."""

    def __init__(
        self,
        shape: EncoderShape,
        embeddings: tuple[Tensor, Tensor, Tensor],
        norm: Norm,
        layers: Sequence[EncoderLayer],
        head: ScoreHead | None,
    ) -> None:
        self.shape = shape
        self._words, self._positions, self._segments = embeddings
        self._norm = norm
        self._layers = layers
        self.head = head
        self._attend = self._attend_by_length

    @property
    def device(self) -> torch.device:
        return self._words.device

    @property
    def dtype(self) -> torch.dtype:
        return self._words.dtype

    def __call__(self, batch: Packed) -> Tensor:
        """The last layer's states [tokens, hidden]."""
        x = F.embedding(batch.tokens, self._words)
        x = x + F.embedding(batch.positions, self._positions) + F.embedding(batch.segments, self._segments)
        x = self._normed(x, self._norm)
        for layer in self._layers:
            x = self._normed(x + layer.out(self._attend(layer.qkv(x), batch)), layer.attention_norm)
            x = self._normed(x + layer.down(F.gelu(layer.up(x))), layer.output_norm)
        return x

    @torch.inference_mode()
    def warm_up(self, *, attends_varlen: bool = False) -> None:
        """Run once. With `attends_varlen`, attention becomes one call for all texts, if that works and gives the
        same."""
        batch = Packed.of([[0, 0, 0], [0] * 4, [0] * 4, [0] * 9], [None] * 4, self.device)
        expected = self(batch)
        if attends_varlen:
            self._attend = self._attend_at_once
            try:
                same = torch.allclose(self(batch), expected, atol=1e-2)
            except (RuntimeError, NotImplementedError):  # not in this build of torch, or not for this device
                same = False
            if not same:
                log.info("attention of this encoder is computed by length")
                self._attend = self._attend_by_length

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        return F.layer_norm(x, (self.shape.hidden,), norm.weight, norm.bias, self.shape.norm_eps)

    def _attend_by_length(self, qkv: Tensor, batch: Packed) -> Tensor:
        heads, hidden = self.shape.heads, self.shape.hidden
        mixed = torch.empty(qkv.shape[0], hidden, dtype=qkv.dtype, device=qkv.device)
        for start, count, length in batch.groups():
            rows = slice(start, start + count * length)
            # [count, length, 3, heads, size] to three of [count, heads, length, size]
            q, k, v = qkv[rows].view(count, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v)
            mixed[rows] = attended.transpose(1, 2).reshape(count * length, hidden)
        return mixed

    def _attend_at_once(self, qkv: Tensor, batch: Packed) -> Tensor:
        q, k, v = qkv.view(1, qkv.shape[0], 3, self.shape.heads, -1).unbind(2)
        longest = batch.lengths[-1]
        mixed: Tensor = torch.ops.aten._efficient_attention_forward(
            q, k, v, None, batch.starts, batch.starts, longest, longest, 0.0, 0
        )[0]
        return mixed.reshape(qkv.shape[0], self.shape.hidden)


def build_encoder(
    checkpoint: Checkpoint,
    shape: EncoderShape,
    device: torch.device,
    dtype: torch.dtype,
    product: MakeProduct = dense,
) -> Encoder:
    """Read the weights and put them where they are used; `product` makes the layers' linears of them."""
    read = _reader(checkpoint, device, dtype)

    def linear(*names: str, make: MakeProduct = product) -> Product:
        """Several of them side by side, as one."""
        weights = [read(f"{name}.weight") for name in names]
        biases = [read(f"{name}.bias") for name in names]
        return make(torch.cat(weights), torch.cat(biases))

    def norm(name: str) -> Norm:
        return Norm(read(f"{name}.weight"), read(f"{name}.bias"))

    layers = []
    for index in range(shape.layers):
        at = f"encoder.layer.{index}"
        layers.append(
            EncoderLayer(
                qkv=linear(*(f"{at}.attention.self.{name}" for name in ("query", "key", "value"))),
                out=linear(f"{at}.attention.output.dense"),
                attention_norm=norm(f"{at}.attention.output.LayerNorm"),
                up=linear(f"{at}.intermediate.dense"),
                down=linear(f"{at}.output.dense"),
                output_norm=norm(f"{at}.output.LayerNorm"),
            )
        )
    words, positions, segments = (
        read(f"embeddings.{name}_embeddings.weight") for name in ("word", "position", "token_type")
    )
    head = ScoreHead(linear("pooler.dense", make=dense), linear("classifier", make=dense)) if shape.scores else None
    return Encoder(shape, (words, positions, segments), norm("embeddings.LayerNorm"), layers, head)


def _reader(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Callable[[str], Tensor]:
    """Tensors by their name inside the model, which some checkpoints put under `bert.`"""
    names: Collection[str] = checkpoint.names()
    prefix = "bert." if any(name.startswith("bert.") for name in names) else ""

    def read(name: str) -> Tensor:
        stored = next((found for found in (f"{prefix}{name}", name) if found in names), None)
        if stored is None:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}; it is not a whole BERT encoder")
        return checkpoint.tensor(stored, device).to(device, dtype, copy=True)

    return read
