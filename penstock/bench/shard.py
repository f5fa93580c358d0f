"""What several GPUs would give, computed from one shard that is measured alone.

A shard of a tensor-parallel model is timed on one device as a model of its own: its part of the heads, of the
feed-forward width and of the vocabulary, without the sums between shards. What the sums take is arithmetic: their
number, their bytes, and a link of stated speed and latency. So the result is computed, not measured, and says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.config import EngineConfig
from penstock.engine.request import Request, SamplingParams
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Link:
    """Between any two devices."""

    bytes_per_s: float = 450e9
    """Each way; the default is NVLink of the Hopper generation."""
    latency_s: float = 10e-6
    """Of one all-reduce of a few bytes, from launch to end: assumed, since it was measured on one GPU only."""

    def all_reduce_s(self, nbytes: int, shards: int) -> float:
        """One-shot or two-shot, whichever is shorter; the second wait of the latter is half a latency."""
        one_shot = (shards - 1) * nbytes / self.bytes_per_s
        two_shot = self.latency_s / 2 + 2 * (shards - 1) / shards * nbytes / self.bytes_per_s
        return self.latency_s + min(one_shot, two_shot)


@dataclass(frozen=True, slots=True)
class ShardedStep:
    """A decode step of `batch` sequences."""

    batch: int
    shard_s: float
    """Measured: a shard's own work."""
    sums_s: float
    """Computed: all-reduces and the gathered logits."""

    @property
    def step_s(self) -> float:
        return self.shard_s + self.sums_s


def shard_shape(config: dict[str, Any], shards: int) -> dict[str, Any]:
    """A model as large as one of `shards` of this one."""
    heads, kv_heads, width = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    )
    if heads % shards or width % shards or (kv_heads % shards and shards % kv_heads):
        raise ConfigError(f"{shards} shards do not divide {heads} heads, {kv_heads} KV heads and a width of {width}")
    return config | {
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "num_attention_heads": heads // shards,
        "num_key_value_heads": max(1, kv_heads // shards),
        "intermediate_size": width // shards,
        "vocab_size": -(-config["vocab_size"] // shards),
    }


def sums_s(config: dict[str, Any], shards: int, batch: int, link: Link, number_bytes: int = 2) -> float:
    """Seconds of one decode step between shards: two all-reduces a layer, and the logits."""
    reduced = link.all_reduce_s(batch * config["hidden_size"] * number_bytes, shards)
    gathered = link.latency_s + batch * config["vocab_size"] * number_bytes * (shards - 1) / shards / link.bytes_per_s
    return float(2 * config["num_hidden_layers"] * reduced + gathered)


def decode_s(engine: Any, batch: int, context: int, steps: int = 40) -> float:
    """Median seconds of a decode step of `batch` sequences with about `context` tokens each."""
    vocabulary = engine.info.vocab_size
    for index in range(batch):
        prompt = [(index * 31 + at * 7) % vocabulary for at in range(context)]
        params = SamplingParams(max_tokens=steps + 24, temperature=0.0)
        engine.submit(Request(f"r{index}", prompt, params))
    while engine.scheduler.waiting or any(seq.computed < seq.prompt_len for seq in engine.scheduler.running):
        engine.step()
    for _ in range(8):
        engine.step()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    while engine.has_work:
        engine.step()
    return statistics.median(times)


def measure(
    config: dict[str, Any], shards: int, batches: Sequence[int], link: Link, settings: EngineConfig, context: int = 512
) -> Iterator[ShardedStep]:
    """Times one shard of random weights on the device of `settings`."""
    import torch

    from penstock.engine.core import Engine
    from penstock.engine.loading.random_checkpoint import RandomCheckpoint

    where = "cuda" if settings.device.startswith("cuda") else "cpu"
    dtype = torch.bfloat16 if where == "cuda" else torch.float32
    engine = Engine.load(settings, checkpoint=RandomCheckpoint(shard_shape(config, shards), device=where, dtype=dtype))
    try:
        for batch in batches:
            alone = decode_s(engine, batch, context)
            yield ShardedStep(batch, alone, sums_s(config, shards, batch, link))
    finally:
        engine.close()
