"""Turning GGML block formats into dense float32 tensors.

Each format is one function from blocks `[n, bytes]` to weights `[n, weights]`, written with whole-tensor torch
operations, so it runs on whatever device the bytes are on. Work goes in slices small enough for the temporaries
to stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.engine.backends.host_memory import is_host
from penstock.engine.loading.gguf import BLOCK, GGMLType
from penstock.engine.loading.mxfp4 import from_gguf_blocks

SLICE_WEIGHTS = 1 << 18
"""Weights decoded at once on a CPU."""

DENSE = {GGMLType.F32: torch.float32, GGMLType.F16: torch.float16, GGMLType.BF16: torch.bfloat16}
"""Types that are not quantized; they are returned as stored."""


def dequantize(data: Tensor, kind: GGMLType, shape: tuple[int, ...]) -> Tensor:
    """Decode the uint8 `data` of a tensor of `shape`: float32, or the stored type for float types."""
    if kind in DENSE:
        return data.reshape(-1).view(DENSE[kind]).reshape(shape)
    weights, size = BLOCK[kind]
    decode = _DECODERS[kind]
    blocks = data.reshape(-1, size)
    if not is_host(data.device):
        return decode(blocks).reshape(shape)
    out = torch.empty(blocks.shape[0], weights, dtype=torch.float32)
    step = SLICE_WEIGHTS // weights
    for start in range(0, blocks.shape[0], step):
        out[start : start + step] = decode(blocks[start : start + step])
    return out.reshape(shape)


def half_at(blocks: Tensor, offset: int) -> Tensor:
    """The float16 at a byte offset of every block, as a float32 column."""
    return blocks[:, offset : offset + 2].view(torch.float16).float()


def nibbles(quants: Tensor) -> Tensor:
    """Low halves of the bytes, then high halves."""
    return torch.cat((quants & 15, quants >> 4), dim=-1)


def fifth_bits(blocks: Tensor, offset: int) -> Tensor:
    """32 single bits stored in 4 bytes, each moved to bit 4."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    bits = (blocks[:, offset : offset + 4, None] >> shifts) & 1
    return bits.reshape(-1, 32) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return (nibbles(blocks[:, 2:]).float() - 8) * half_at(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return torch.addcmul(half_at(blocks, 2), nibbles(blocks[:, 4:]).float(), half_at(blocks, 0))


def _q5_0(blocks: Tensor) -> Tensor:
    quants = nibbles(blocks[:, 6:]) | fifth_bits(blocks, 2)
    return (quants.float() - 16) * half_at(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    quants = nibbles(blocks[:, 8:]) | fifth_bits(blocks, 4)
    return torch.addcmul(half_at(blocks, 2), quants.float(), half_at(blocks, 0))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * half_at(blocks, 0)


def k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and offset of the eight 32-weight parts of a K block: each float32 [n, 8, 1].

    Twelve bytes hold sixteen 6-bit numbers: the first four of each kind in the low bits of bytes 0-3 and 4-7,
    the last four with their low nibbles in bytes 8-11 and their high bits on top of bytes 0-3 and 4-7.
    """
    first, second, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (low & 15) | ((first >> 6) << 4)), dim=-1).float()
    offsets = torch.cat((second & 63, (low >> 4) | ((second >> 6) << 4)), dim=-1).float()
    return (scales * half_at(blocks, 0))[..., None], (offsets * half_at(blocks, 2))[..., None]


def _q4_k(blocks: Tensor) -> Tensor:
    scales, offsets = k_scales(blocks)
    quants = nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (quants.float() * scales - offsets).reshape(-1, 256)


def quants_q5_k(blocks: Tensor) -> Tensor:
    """uint8 [n, 8, 32], from 0 to 31."""
    quants = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    return quants | ((blocks[:, None, 16:48] >> shifts) & 1) << 4


def _q5_k(blocks: Tensor) -> Tensor:
    scales, offsets = k_scales(blocks)
    return (quants_q5_k(blocks).float() * scales - offsets).reshape(-1, 256)


def _q6_k(blocks: Tensor) -> Tensor:
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)[:, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4
    scales = blocks[:, 192:208].view(torch.int8).float() * half_at(blocks, 208)
    quants = (low | high).float() - 32
    return (quants.reshape(-1, 16, 16) * scales[..., None]).reshape(-1, 256)


def _mxfp4(blocks: Tensor) -> Tensor:
    return from_gguf_blocks(blocks, blocks.shape[0]).dense()


_DECODERS: dict[GGMLType, Callable[[Tensor], Tensor]] = {
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
    GGMLType.MXFP4: _mxfp4,
}
