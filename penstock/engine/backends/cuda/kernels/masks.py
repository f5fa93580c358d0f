"""Token masks on logits: one bit per token decides whether a logit stays or becomes -inf.

A program takes a stretch of one constrained row. The bits of a stretch are 1/32 of its size, so the cost is that of
the writes; logits that stay are neither read nor written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import ceil_div, launch, launch_successor, wait_for_inputs

_TILE = 4096


@triton.jit
def _mask_kernel(
    logits_ptr: tl.tensor,
    at_ptr: tl.tensor,
    bits_ptr: tl.tensor,
    stride: tl.tensor,
    words: tl.tensor,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    entry = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    row = tl.load(at_ptr + entry)
    inside = token < VOCAB
    word = tl.load(bits_ptr + entry * words + token // 32, mask=inside, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    nothing = tl.full([TILE], float("-inf"), tl.float32)
    tl.store(logits_ptr + row * stride + token, nothing, mask=inside & forbidden)


def mask_logits(logits: Tensor, at: Tensor, bits: Tensor, *, pdl: bool = False) -> None:
    """See `Ops.mask_logits`."""
    if at.shape[0] == 0:
        return
    vocab = logits.shape[1]
    launch(
        _mask_kernel,
        (at.shape[0], ceil_div(vocab, _TILE)),
        logits,
        at,
        bits,
        logits.stride(0),
        bits.shape[1],
        VOCAB=vocab,
        TILE=_TILE,
        num_warps=4,
        pdl=pdl,
    )
