"""What layers are told of a token itself (per-layer embeddings): a vector for each layer, beside the residual stream.

It is made where tokens are embedded, of a table's row and of the embedding, and goes from there to the layers as an
attribute of the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import Ops
from penstock.engine.models.layers.linear import Linear

_ATTRIBUTE, _KEYS = "token_inputs", "keys_of_layers"


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Makes the vectors of all layers."""

    ops: Ops
    table: Tensor
    """[vocab, layers * size], in the checkpoint's type."""
    project: Linear
    """From an embedding to a vector for each layer."""
    norm: Tensor
    """[size]: of what that gives."""
    eps: float

    def vectors(self, token_ids: Tensor, stream: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, layers * size]. `stream`: the initial residual stream of these tokens."""
        size, hidden = len(self.norm), stream.shape[1]
        own: Tensor = F.embedding(token_ids, self.table).to(dtype) * size**0.5
        made = self.project(stream.to(dtype)) * hidden**-0.5
        normed: Tensor = self.ops.rms_norm(made.view(-1, size), self.norm, self.eps)
        return (normed.view(own.shape) + own) * 2**-0.5


@dataclass(frozen=True, slots=True)
class TokenInput:
    """One layer's part: norm(output(gelu(gate(stream)) * vector)), which is added to the stream."""

    ops: Ops
    layer: int
    """Its place among those whose vectors come with the stream."""
    gate: Linear
    output: Linear
    norm: Tensor

    @property
    def weight_bytes(self) -> int:
        return self.gate.weight_bytes + self.output.weight_bytes

    def add(self, given: Tensor, residual: Tensor, ops: Any, eps: float, dtype: torch.dtype) -> None:
        """`given`: the vectors that come with the stream. In place."""
        gate = self.gate(residual.to(dtype))
        size = gate.shape[1]
        own = given[:, self.layer * size : (self.layer + 1) * size]
        ops.add_rms_norm(self.output(ops.gelu_mul(torch.cat((gate, own), dim=1))), residual, None, eps, self.norm)


def attach(stream: Tensor, vectors: Tensor, keys: dict[int, Tensor] | None = None) -> None:
    """`vectors`: of the layers that this stream goes through, all behind one another. `keys`: in a pipeline, keys and
    values that earlier stages have projected, by their layers."""
    setattr(stream, _ATTRIBUTE, vectors)
    setattr(stream, _KEYS, keys or {})


def given_with(stream: Tensor) -> Tensor:
    """The vectors that were attached to a residual stream."""
    found: Tensor = getattr(stream, _ATTRIBUTE)
    return found


def keys_with(stream: Tensor) -> dict[int, Tensor]:
    """The keys and values; none of a stream that begins here."""
    found: dict[int, Tensor] = getattr(stream, _KEYS, {})
    return found
