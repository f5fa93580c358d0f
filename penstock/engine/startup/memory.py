"""Memory of the KV cache: sized last, from what is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from penstock.engine.backends.backend import Backend, WeightPlan
from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.config import EngineConfig
from penstock.engine.kv.allocator import SlidingWindow, held_at_once
from penstock.engine.kv.cache import CacheShape, KVCache
from penstock.engine.loading.checkpoint import GGUFCheckpoint
from penstock.engine.loading.quantized import QuantizedCheckpoint
from penstock.engine.loading.random_checkpoint import stored_elements
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.weights import Weights
from penstock.errors import ConfigError
from penstock.machine import usable_memory

_UNBOUNDED = 1 << 16
"""Slots in host memory of what takes none on this rank; others have less room."""
_KEPT_PER_ROW, _KEPT_SHARE = 4, 0.25
"""States of recurrent layers that are kept for later prompts: so many for each sequence, in at most this share of the
cache's memory."""


class CacheSize(NamedTuple):
    """What a cache has room for."""

    blocks: int
    """Of tokens, the null block included."""
    states: int
    """Slots of recurrent layers' states, slot 0 included."""


def size_cache(
    config: EngineConfig,
    backend: Backend,
    decoder: Decoder,
    dtype: torch.dtype,
    *,
    max_running: int,
    max_model_len: int,
    budget: int,
    beside: int = 0,
    apart: int = 0,
    graphs: int = 0,
) -> CacheSize:
    """As asked for, or a share of what is left.

    `beside`: bytes that every block needs outside this cache (in a draft model's). `apart`: bytes that are to stay
    free. `graphs`: bytes that captured steps will take of what a share leaves.
    """
    shape = decoder.cache_shape(config.block_size, dtype)
    rows, kept = max_running + 1, config.kept_states
    if not config.prefix_cache and config.speculation == "off":  # draft tokens take what is not kept
        kept = 0
    elif kept is None and not shape.state_bytes:
        kept = _KEPT_PER_ROW * max_running  # nothing here, but other ranks may have recurrent layers
    if config.num_blocks is not None:
        return CacheSize(config.num_blocks + 1, rows + (_KEPT_PER_ROW * max_running if kept is None else kept))
    block_bytes = shape.block_bytes + beside
    memory = config.kv_memory
    if memory is None:
        taken = _activation_bytes(backend, decoder, dtype, budget, config.block_size) + apart
        memory = _room(config, backend, taken, graphs)
    elif memory > (free := backend.memory.available()):
        raise ConfigError(f"kv_memory: {_gib(memory)} are more than the {_gib(free)} that are free on {backend.device}")
    memory -= shape.state_bytes * (rows + (kept or 0))
    if kept is None:
        kept = max(0, min(_KEPT_PER_ROW * max_running, int(memory * _KEPT_SHARE) // shape.state_bytes))
        memory -= kept * shape.state_bytes
    useful = max_running * -(-max_model_len // config.block_size)
    blocks = min(memory // block_bytes, useful) if block_bytes else useful
    if memory < 0 and shape.state_bytes:
        raise ConfigError(
            f"no room for the states of {max_running} sequences, {_gib(shape.state_bytes)} each; lower max_running or "
            "raise kv_memory"
        )
    if blocks < 1:
        left = f" beside {_gib(apart)} that are left free for adapters" if apart else ""
        remedy = ", lower adapter_memory," if apart else ","
        raise ConfigError(
            f"no room for the KV cache: one block needs {_gib(block_bytes)}, {_gib(max(memory, 0))} are allowed{left}; "
            f"raise kv_memory or memory_share{remedy} or free memory"
        )
    return CacheSize(int(blocks) + 1, rows + kept)


def check_weights_fit(config: EngineConfig, weights: Weights, plan: WeightPlan, dtype: torch.dtype, free: int) -> None:
    """Refuses weights that host memory cannot hold, before any is read: the system would end some process or other for
    them. They take at least this much; what stays in more bits, and what is kept beside them, is not counted."""
    file = Path(config.model) / "config.json"
    # What wraps a checkpoint may hide its form, and the key may be at any depth of the file.
    settings: Any = file.read_text() if file.is_file() else weights.config
    if isinstance(weights, GGUFCheckpoint | QuantizedCheckpoint) or "quantization_config" in settings:
        bits = 4  # perhaps 8, but some have only their experts in 4
    elif plan.quantize is not None:
        bits = 4 if config.weights == "int4" else 8
    else:
        bits = 8 * dtype.itemsize
    least = stored_elements(weights.config) * bits // 8 // config.ranks
    if least > free:
        fewer = "" if bits == 4 else f", fewer bits (weights: {'int4' if bits == 8 else 'int8 or int4'})"
        raise ConfigError(
            f"the weights of {config.name or config.model} take at least {_gib(least)}, and {_gib(free)} of memory are "
            f"free; choose a smaller model{fewer} or another device"
        )


@contextmanager
def weights_fitting(config: EngineConfig, backend: Backend) -> Iterator[None]:
    """Says what to do where a device has no room for the weights that are loaded meanwhile."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the weights of {config.name or config.model} do not fit on {backend.device}, which has "
            f"{_gib(backend.memory.total())} of memory and {_gib(backend.memory.available())} left of it; choose more "
            "devices (tensor_parallel), fewer bits (weights: fp8 or int4) or a smaller model, or free memory there"
        ) from error


def count_host_blocks(config: EngineConfig, shape: CacheShape, recurrent: bool = False) -> tuple[int, int]:
    """KV blocks and states that `host_memory` holds; of models with recurrent layers half of it is for states."""
    if not config.prefix_cache:
        raise ConfigError(
            "host_memory keeps blocks for later prompts, which prefix_cache: false forbids; set one of them"
        )
    if config.host_memory > (free := usable_memory().available):
        raise ConfigError(f"host_memory: {_gib(config.host_memory)} are more than the {_gib(free)} that are free")
    memory = config.host_memory // 2 if recurrent else config.host_memory
    slots = memory // shape.block_bytes if shape.block_bytes else _UNBOUNDED
    states = memory // shape.state_bytes if shape.state_bytes else _UNBOUNDED
    if slots < 1:
        raise ConfigError(f"host_memory is {_gib(config.host_memory)}, one KV block needs {_gib(shape.block_bytes)}")
    if recurrent and states < 1:
        raise ConfigError(f"host_memory: half of it is for states, and one needs {_gib(shape.state_bytes)}")
    return slots, states


def count_disk_places(config: EngineConfig, shape: CacheShape, recurrent: bool = False) -> tuple[int, int]:
    """KV blocks and states that `disk_memory` holds; where there are both, half of it is for each."""
    if not config.disk_memory:
        return 0, 0
    divided = recurrent and shape.block_bytes and shape.state_bytes
    memory = config.disk_memory // 2 if divided else config.disk_memory
    places = memory // shape.block_bytes if shape.block_bytes else _UNBOUNDED
    states = memory // shape.state_bytes if shape.state_bytes else _UNBOUNDED
    share = "half of disk_memory" if divided else "disk_memory"
    if places < 1:
        raise ConfigError(f"{share} is less than one KV block of {shape.block_bytes} bytes")
    if recurrent and states < 1:
        raise ConfigError(f"{share} is less than one state of {shape.state_bytes} bytes")
    return places, states if recurrent else 0


def _gib(size: float) -> str:
    """A size in bytes for a person: GiB, or KiB where that would be nothing."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**10:,.0f} KiB"


def sliding_window(model: ModelConfig, step_tokens: int) -> SlidingWindow | None:
    """What bounds a sequence's blocks, where every layer forgets; one layer that sees everything needs them all."""
    windows = [window for window in model.windows if window is not None]
    return SlidingWindow(max(windows), step_tokens) if len(windows) == len(model.windows) else None


def longest_sequence(wanted: int, num_blocks: int, block_size: int, window: SlidingWindow | None) -> int:
    """`wanted` tokens, or what one sequence that has the whole cache can hold. Block 0 is reserved for padding."""
    if held_at_once(wanted, block_size, window) < num_blocks:
        return wanted
    return min(wanted, (num_blocks - 1) * block_size)


def _room(config: EngineConfig, backend: Backend, activations: int, graphs: int) -> int:
    """Bytes for the cache when none are given: of what is free, or of what this model's share has left. Captured steps
    have the remainder, and more where that is less than they take: a large model leaves little free."""
    memory, ranks = backend.memory, config.ranks if backend.memory.shared_by_ranks else config.ranks_per_device
    free = memory.available() - activations * config.ranks_per_device
    if config.memory_share is None:
        return _beside_graphs(free // ranks, memory.share_of_free, graphs)
    rest = int(memory.total() * config.memory_share / ranks) - memory.used() - activations
    return min(_beside_graphs(rest, memory.share_of_rest, graphs), free)


def _beside_graphs(room: int, share: float, graphs: int) -> int:
    """On a small device they have to do with a quarter: steps that cannot be captured are padded to larger ones."""
    return min(int(room * share), room - min(graphs, room // 4))


@torch.inference_mode()
def _activation_bytes(backend: Backend, decoder: Decoder, dtype: torch.dtype, budget: int, block_size: int) -> int:
    """What the largest step needs besides weights and cache, measured by running one (a single long prompt) where the
    device can measure it; with what it takes over a longer context."""
    tokens = min(budget, decoder.max_positions)
    kv = KVCache(decoder.cache_shape(block_size, dtype), -(-tokens // block_size) + 1, backend.device, num_states=2)

    def longest_step() -> None:
        batch = AttentionBatch.of_one(tokens, block_size, backend.device)
        decoder.logits(decoder.forward(torch.zeros_like(batch.positions), batch, kv)[-256:])

    return int(backend.memory.peak(longest_step) * budget / tokens) + backend.long_context_bytes(decoder, kv)
