"""Token masks on the device: allowed logits stay as they are, the others become -inf, other rows are not touched."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gpu_harness import DEVICE, MODE, QUICK, Row, bandwidth, check_equal, integers, rand, rng, time_us
from torch import Tensor

from penstock.engine.kernels.masks import mask_logits
from penstock.engine.kernels.triton.ops import TritonOps

ops = TritonOps(DEVICE)
VOCABS = [5, 3000] if QUICK else [5, 3000, 49152, 128256, rng.randrange(2, 200000)]


def random_bits(rows: int, vocab: int) -> Tensor:
    words = -(-vocab // 32)
    values = [rng.getrandbits(32) - 2**31 for _ in range(rows * words)]
    return integers(values, torch.int32).view(rows, words)


def test_masks_follow_their_definition() -> None:
    for vocab in VOCABS:
        for dtype in (torch.float32, torch.bfloat16):
            rows = 6
            logits = rand(rows, vocab, dtype=dtype)
            want = logits.cpu().clone()
            at = integers([4, 0, 3], torch.int64)
            bits = random_bits(3, vocab)
            bits[1] = -1
            ops.mask_logits(logits, at, bits)
            if MODE == "compile":
                continue
            mask_logits(want, at.cpu(), bits.cpu())
            check_equal(f"mask {vocab} {dtype}", logits, want)


def bench_masks() -> Iterator[Row]:
    vocab = 128256
    for count in (1, 16, 64):
        sets = [rand(count, vocab) for _ in range(4)]
        at = torch.arange(count, device=DEVICE)
        bits = torch.zeros(count, -(-vocab // 32), dtype=torch.int32, device=DEVICE)
        us = time_us([lambda x=x, a=at, b=bits: ops.mask_logits(x, a, b) for x in sets])
        yield bandwidth(f"mask_logits {count}x{vocab}", us, count * vocab * 4)
