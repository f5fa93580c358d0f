"""Attention of layers that share keys and values across stages of a pipeline.

The stage that has their layer passes on what it projects of every token, before norms and rotation. The first layer of
a later stage that attends to them stores them in that stage too (`GivenAttention`), as the layer itself does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.kv.kinds import PagedKVCache
from penstock.engine.models.layers.attention import Attention


@dataclass(slots=True)
class StepKeys:
    """Keys and values of a step's tokens as they were projected."""

    layer: int
    """Of the whole model: the one that projects them."""
    rows: Tensor | None = None

    def of(self, count: int) -> Tensor:
        if self.rows is None or len(self.rows) != count:
            raise RuntimeError(f"keys and values of layer {self.layer} are of another stage, which has not sent them")
        return self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LeavingAttention(Attention):
    """See `Attention`. Its keys and values are left in `step` for later stages."""

    step: StepKeys

    def forward(self, x: Any, batch: AttentionBatch, cache: PagedKVCache) -> Tensor:
        qkv = self.qkv(x)
        self.step.rows = qkv[:, self.heads.heads * self.heads.head_dim :].clone()
        return self.output(self.attend(qkv, batch, cache))


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenAttention(Attention):
    """See `Attention`. `qkv` gives queries alone; keys and values are found in `step`."""

    step: StepKeys

    def forward(self, x: Any, batch: AttentionBatch, cache: PagedKVCache) -> Tensor:
        queries = self.qkv(x)
        return self.output(self.attend(torch.cat((queries, self.step.of(len(queries))), dim=1), batch, cache))
