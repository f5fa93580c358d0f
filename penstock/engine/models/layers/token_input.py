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

_ATTRIBUTE = "token_inputs"


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

    def attach(self, token_ids: Tensor, stream: Tensor, dtype: torch.dtype) -> None:
        """`stream`: the initial residual stream of these tokens."""
        size, hidden = len(self.norm), stream.shape[1]
        own = F.embedding(token_ids, self.table).to(dtype) * size**0.5
        made = self.project(stream.to(dtype)) * hidden**-0.5
        normed = self.ops.rms_norm(made.view(-1, size), self.norm, self.eps)
        setattr(stream, _ATTRIBUTE, (normed.view(own.shape) + own) * 2**-0.5)


@dataclass(frozen=True, slots=True)
class TokenInput:
    """One layer's part: norm(output(gelu(gate(stream)) * vector)), which is added to the stream."""

    ops: Ops
    layer: int
    gate: Linear
    output: Linear
    norm: Tensor

    @property
    def weight_bytes(self) -> int:
        return self.gate.weight_bytes + self.output.weight_bytes

    def add(self, given: Tensor, residual: Tensor, ops: Any, eps: float, dtype: torch.dtype) -> None:
        """`given`: the vectors of all layers. In place."""
        gate = self.gate(residual.to(dtype))
        size = gate.shape[1]
        own = given[:, self.layer * size : (self.layer + 1) * size]
        ops.add_rms_norm(self.output(ops.gelu_mul(torch.cat((gate, own), dim=1))), residual, None, eps, self.norm)


def given_with(stream: Tensor) -> Tensor:
    """The vectors of all layers that were attached to a residual stream."""
    found: Tensor = getattr(stream, _ATTRIBUTE)
    return found
