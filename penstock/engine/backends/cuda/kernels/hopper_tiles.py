"""How key and value tiles of `hopper_prefill` come into shared memory: a warp that does nothing but issue TMA copies.

A tile is 128 tokens, two boxes of 64 columns. In a paged cache it is eight blocks, each with copies of its own;
gathered keys (`gathered_prefix`) are contiguous.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def _copy_blocks(
    desc: tma.tensor_descriptor,
    block_ids: gl.tuple,
    kv_head: gl.tensor,
    KV_HEADS: gl.constexpr,
    bar: gl.shared_memory_descriptor,
    boxes: gl.shared_memory_descriptor,
    first: gl.tensor,
) -> None:
    """The copies of one tile: eight cache blocks, each in two boxes of 64 columns."""
    for j in gl.static_range(8):
        row = (block_ids[j] * KV_HEADS + kv_head) * 16
        tma.async_copy_global_to_shared(desc, [row, 0], bar, boxes.index(first + j))
        tma.async_copy_global_to_shared(desc, [row, 64], bar, boxes.index(first + 8 + j))


@gluon.jit
def paged_producer(
    k_desc: tma.tensor_descriptor,
    v_desc: tma.tensor_descriptor,
    k_boxes: gl.shared_memory_descriptor,
    v_boxes: gl.shared_memory_descriptor,
    k_ready: gl.shared_memory_descriptor,
    k_free: gl.shared_memory_descriptor,
    v_ready: gl.shared_memory_descriptor,
    v_free: gl.shared_memory_descriptor,
    table: gl.tensor,
    last_block: gl.tensor,
    tiles: gl.tensor,
    kv_head: gl.tensor,
    KV_HEADS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Tiles of a paged cache."""
    TILE_BYTES: gl.constexpr = 128 * 128 * 2
    for i in range(tiles):
        at = (tiles - 1 - i) * 8
        b0 = gl.load(table + gl.minimum(at, last_block))
        b1 = gl.load(table + gl.minimum(at + 1, last_block))
        b2 = gl.load(table + gl.minimum(at + 2, last_block))
        b3 = gl.load(table + gl.minimum(at + 3, last_block))
        b4 = gl.load(table + gl.minimum(at + 4, last_block))
        b5 = gl.load(table + gl.minimum(at + 5, last_block))
        b6 = gl.load(table + gl.minimum(at + 6, last_block))
        b7 = gl.load(table + gl.minimum(at + 7, last_block))
        block_ids = (b0, b1, b2, b3, b4, b5, b6, b7)
        stage = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_ready.index(stage), TILE_BYTES)
        _copy_blocks(k_desc, block_ids, kv_head, KV_HEADS, k_ready.index(stage), k_boxes, stage * 16)
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_ready.index(stage), TILE_BYTES)
        _copy_blocks(v_desc, block_ids, kv_head, KV_HEADS, v_ready.index(stage), v_boxes, stage * 16)


@gluon.jit
def contiguous_producer(
    k_desc: tma.tensor_descriptor,
    v_desc: tma.tensor_descriptor,
    k_boxes: gl.shared_memory_descriptor,
    v_boxes: gl.shared_memory_descriptor,
    k_ready: gl.shared_memory_descriptor,
    k_free: gl.shared_memory_descriptor,
    v_ready: gl.shared_memory_descriptor,
    v_free: gl.shared_memory_descriptor,
    first_row: gl.tensor,
    tiles: gl.tensor,
    STAGES: gl.constexpr,
) -> None:
    """Tiles of gathered keys and values, each in two boxes of 64 columns."""
    TILE_BYTES: gl.constexpr = 128 * 128 * 2
    for i in range(tiles):
        row = first_row + (tiles - 1 - i) * 128
        stage = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_ready.index(stage), TILE_BYTES)
        tma.async_copy_global_to_shared(k_desc, [row, 0], k_ready.index(stage), k_boxes.index(stage * 2))
        tma.async_copy_global_to_shared(k_desc, [row, 64], k_ready.index(stage), k_boxes.index(stage * 2 + 1))
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_ready.index(stage), TILE_BYTES)
        tma.async_copy_global_to_shared(v_desc, [row, 0], v_ready.index(stage), v_boxes.index(stage * 2))
        tma.async_copy_global_to_shared(v_desc, [row, 64], v_ready.index(stage), v_boxes.index(stage * 2 + 1))


@gluon.jit
def fp8_producer(
    k_desc: tma.tensor_descriptor,
    v_desc: tma.tensor_descriptor,
    k_tiles: gl.shared_memory_descriptor,
    v_tiles: gl.shared_memory_descriptor,
    k_ready: gl.shared_memory_descriptor,
    k_free: gl.shared_memory_descriptor,
    v_ready: gl.shared_memory_descriptor,
    v_free: gl.shared_memory_descriptor,
    first_row: gl.tensor,
    tiles: gl.tensor,
    STAGES: gl.constexpr,
) -> None:
    """Tiles of gathered keys and transposed values in FP8, each in one box."""
    TILE_BYTES: gl.constexpr = 128 * 128
    for i in range(tiles):
        row = first_row + (tiles - 1 - i) * 128
        stage = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_ready.index(stage), TILE_BYTES)
        tma.async_copy_global_to_shared(k_desc, [row, 0], k_ready.index(stage), k_tiles.index(stage))
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_ready.index(stage), TILE_BYTES)
        tma.async_copy_global_to_shared(v_desc, [row, 0], v_ready.index(stage), v_tiles.index(stage))
