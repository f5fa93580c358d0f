"""What one process holds of a model: its decoder and its KV cache, loaded phase by phase.

With one device that is the whole model. In an engine of several ranks each of them loads its own part with this very
code, as a `Member` (`engine.parallel`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from penstock.engine.adapters.runtime import AdapterRuntime, make_adapters
from penstock.engine.backends.interface import FP8, INT8, Ops
from penstock.engine.config import EngineConfig
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.build import Weights, build_decoder
from penstock.engine.models.calibration import settle
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder import Decoder
from penstock.engine.startup.device import (
    check_deterministic,
    pick_device,
    pick_dtype,
    pick_kv_dtype,
    pick_ops,
    plan_weights,
)
from penstock.engine.startup.memory import count_blocks, longest_sequence, sliding_window, state_rows
from penstock.engine.startup.warmup import Limits, compile_kernels

if TYPE_CHECKING:
    from penstock.engine.parallel.member import Member

Progress = Callable[[str, float], None]


class Phases:
    """Times the phases of starting and passes progress on."""

    def __init__(self, progress: Progress | None) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress

    def report(self, phase: str, fraction: float) -> None:
        if self._progress is not None:
            self._progress(phase, fraction)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        self.report(phase, 0.0)
        yield
        self.seconds[phase] = round(time.perf_counter() - begin, 3)
        self.report(phase, 1.0)


@dataclass(frozen=True, slots=True)
class Part:
    """A decoder with its cache, and the limits it was made for."""

    model: ModelConfig
    """The whole model, also where `decoder` is a part of it."""
    decoder: Decoder
    kv: KVCache
    max_running: int
    token_budget: int
    max_model_len: int
    """No longer than one sequence that has the whole cache: or it could neither run nor be preempted."""
    adapters: AdapterRuntime | None = None


def load_part(
    config: EngineConfig,
    checkpoint: object | None,
    phases: Phases,
    member: Member | None = None,
    *,
    ops: Ops | None = None,
    beside: int = 0,
    find_adapter: Callable[[str], Path] = Path,
) -> Part:
    """Read the checkpoint and make decoder and cache; `checkpoint` stands in for the one that `config` names.

    `ops`: kernels to share with another model in this process. `beside`: bytes that every block needs elsewhere.
    `find_adapter`: see `Engine.load`.
    """
    threads = config.threads or max(1, (os.cpu_count() or 1) // config.ranks)
    torch.set_num_threads(threads)
    device = pick_device(config.device)
    if member is not None:
        device = member.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels are launched on the current one
    dtype = pick_dtype(config.dtype, device)
    on_cpu = device.type == "cpu"
    max_running = config.max_running or (64 if on_cpu else 256)
    budget = config.token_budget or (512 if on_cpu else 8192)
    with phases("open"):
        weights = open_weights(config, checkpoint)
        model = local = ModelConfig.from_hf(weights.config)
        head_rows = None
        if member is not None:
            weights, local, head_rows = member.cut(weights, model)
    if member is not None:
        with phases("ranks"):
            member.meet(device)
    with phases("kernels"):
        ops = ops or pick_ops(device, threads)
        if config.deterministic:
            check_deterministic(config, model, ops)
        plan = plan_weights(config, ops, device, dtype, weights)
        kv_dtype = pick_kv_dtype(config, dtype, ops, model)
    wanted_len = min(config.max_model_len or model.max_positions, model.max_positions)
    with phases("weights"), torch.inference_mode():
        decoder = build_decoder(
            weights,
            local,
            ops,
            device=device,
            dtype=dtype,
            max_positions=wanted_len,
            quantize=plan.quantize,
            inner=plan.inner,
            fused_up_to=plan.fused_up_to,
            fp8_cache=kv_dtype == FP8,
            head_rows=head_rows,
            progress=lambda fraction: phases.report("weights", fraction),
        )
    if on_cpu and member is None:
        with phases("trial"):
            decoder = settle(decoder, int8_cache=kv_dtype == INT8)
    adapters = make_adapters(config, decoder, find_adapter, dtype=dtype)
    if ops.name == "triton":
        with phases("compile"):
            most_decodes = max(max_running, config.max_verified(max_running))
            limits = Limits(most_decodes, budget, wanted_len, config.block_size)
            compile_kernels(decoder, kv_dtype, limits, adapters)
    with phases("kv cache"):
        num_blocks = count_blocks(
            config, decoder, kv_dtype, max_running=max_running, max_model_len=wanted_len, budget=budget, beside=beside
        )
        shape = decoder.cache_shape(config.block_size, kv_dtype)
        if member is not None:
            num_blocks = member.least(num_blocks)
            decoder = member.connect(decoder)
        kv = KVCache(shape, num_blocks, device, state_rows(max_running))
    max_model_len = longest_sequence(wanted_len, num_blocks, config.block_size, sliding_window(model, budget))
    return Part(model, decoder, kv, max_running, budget, max_model_len, adapters)


def open_weights(config: EngineConfig, checkpoint: object | None) -> Weights:
    """The checkpoint that `config` names, unless another one stands in for it."""
    if checkpoint is not None:
        return cast(Weights, checkpoint)
    from penstock.engine.loading.checkpoint import open_checkpoint

    return open_checkpoint(config.model)
