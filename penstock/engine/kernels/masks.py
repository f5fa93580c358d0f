"""Token masks on logits, in plain PyTorch: the definition for all devices, and fast enough on a CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def mask_logits(logits: Tensor, at: Tensor, bits: Tensor) -> None:
    """See `Ops.mask_logits`."""
    vocab = logits.shape[1]
    if logits.device.type == "cpu":
        unpacked = np.unpackbits(bits.numpy().view(np.uint8), axis=1, count=vocab, bitorder="little")
        forbidden = torch.from_numpy(unpacked).view(torch.bool).logical_not_()
        for row, index in enumerate(at.tolist()):
            logits[index].masked_fill_(forbidden[row], float("-inf"))
    else:
        lanes = torch.arange(32, dtype=torch.int32, device=logits.device)
        forbidden = ((bits.unsqueeze(-1) >> lanes) & 1).flatten(1)[:, :vocab] == 0
        logits[at] = logits[at].masked_fill(forbidden, float("-inf"))
