"""Memory of the KV cache: sized last, from what is really left."""

from __future__ import annotations

import os

import torch

from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.config import EngineConfig
from penstock.engine.kv.allocator import SlidingWindow, held_at_once
from penstock.engine.kv.cache import CacheShape, KVCache
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder import Decoder
from penstock.errors import ConfigError

_CPU_SHARE = 0.15
"""Of the free memory: the machine has other things to do."""
_CUDA_SHARE = 0.92
"""Of what activations leave: the rest is for CUDA graphs, the sampler, and fragmentation."""


def count_blocks(
    config: EngineConfig,
    decoder: Decoder,
    dtype: torch.dtype,
    *,
    max_running: int,
    max_model_len: int,
    budget: int,
    beside: int = 0,
) -> int:
    """KV blocks to allocate, the null block included: as asked for, or a share of what is left.

    `beside`: bytes that every block needs outside this cache (in a draft model's).
    """
    if config.num_blocks is not None:
        return config.num_blocks + 1
    device, shape = decoder.embedding.device, decoder.cache_shape(config.block_size, dtype)
    block_bytes = shape.block_bytes + beside
    memory = config.kv_memory
    if memory is None:
        activations = 0
        if device.type == "cuda":
            activations = _activation_bytes(decoder, dtype, budget, config.block_size)
        memory = _room(config, device, activations)
    elif memory > _available(device):
        raise ConfigError(f"kv_memory: {memory} bytes are more than the {_available(device)} that are free on {device}")
    memory -= shape.state_bytes * state_rows(max_running)
    useful = max_running * -(-max_model_len // config.block_size)
    blocks = min(memory // block_bytes, useful)
    if blocks < 1:
        raise ConfigError(
            f"no room for the KV cache: one block needs {block_bytes} bytes, {memory} are allowed; "
            "raise kv_memory or memory_share, or free memory"
        )
    return int(blocks) + 1


def state_rows(max_running: int) -> int:
    """Rows of a cache that keeps a state per sequence: one for each that runs, and a scratch row for padding."""
    return max_running + 1


def count_host_blocks(config: EngineConfig, shape: CacheShape) -> int:
    """KV blocks that `host_memory` holds."""
    if not config.prefix_cache:
        raise ConfigError(
            "host_memory keeps blocks for later prompts, which prefix_cache: false forbids; set one of them"
        )
    slots = config.host_memory // shape.block_bytes
    if slots < 1:
        raise ConfigError(f"host_memory is {config.host_memory} bytes, one KV block needs {shape.block_bytes}")
    return slots


def sliding_window(model: ModelConfig, step_tokens: int) -> SlidingWindow | None:
    """What bounds a sequence's blocks, where every layer forgets; one layer that sees everything needs them all."""
    windows = [window for window in model.windows if window is not None]
    return SlidingWindow(max(windows), step_tokens) if len(windows) == len(model.windows) else None


def longest_sequence(wanted: int, num_blocks: int, block_size: int, window: SlidingWindow | None) -> int:
    """`wanted` tokens, or what one sequence that has the whole cache can hold. Block 0 belongs to nobody."""
    if held_at_once(wanted, block_size, window) < num_blocks:
        return wanted
    return min(wanted, (num_blocks - 1) * block_size)


def _room(config: EngineConfig, device: torch.device, activations: int) -> int:
    """Bytes for the cache when none are given: of what is free, or of what this model's share has left."""
    on_cpu = device.type == "cpu"
    free = _available(device) - activations
    if config.memory_share is None:
        return int(free * (_CPU_SHARE / config.ranks if on_cpu else _CUDA_SHARE))
    ranks_here = config.ranks if on_cpu else 1
    left = int(_total(device) * config.memory_share / ranks_here) - _taken(device) - activations
    return min(left if on_cpu else int(left * _CUDA_SHARE), free)


def _available(device: torch.device) -> int:
    """Bytes that can still be taken on the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    try:
        return _meminfo("MemAvailable")
    except (OSError, KeyError):
        return _total(device) // 2


def _total(device: torch.device) -> int:
    """Bytes of the whole device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _taken(device: torch.device) -> int:
    """Bytes that this process has on the device: its weights, and what it needs to run at all."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _meminfo(field: str) -> int:
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields[field].split()[0]) * 1024


@torch.inference_mode()
def _activation_bytes(decoder: Decoder, dtype: torch.dtype, budget: int, block_size: int) -> int:
    """What the largest step needs besides weights and cache, measured by running one (a single long prompt)."""
    device = decoder.embedding.device
    tokens = min(budget, decoder.max_positions)
    blocks = -(-tokens // block_size)
    kv = KVCache(decoder.cache_shape(block_size, dtype), blocks + 1, device, num_rows=1)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    batch = AttentionBatch.of_one(tokens, block_size, device)
    decoder.logits(decoder.forward(torch.zeros_like(batch.positions), batch, kv)[-256:])
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del kv
    return int(peak * budget / tokens)
