"""Token masks on logits, in plain PyTorch: the definition the kernels are tested against."""

from __future__ import annotations

import torch
from torch import Tensor


def mask_logits(logits: Tensor, at: Tensor, bits: Tensor) -> None:
    """See `Ops.mask_logits`."""
    vocab = logits.shape[1]
    positions = torch.arange(32, dtype=torch.int32, device=logits.device)
    forbidden = ((bits.unsqueeze(-1) >> positions) & 1).flatten(1)[:, :vocab] == 0
    logits[at] = logits[at].masked_fill(forbidden, float("-inf"))
