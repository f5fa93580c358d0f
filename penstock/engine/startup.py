"""Building an engine: checkpoint, weights, KV cache, warm-up, each phase timed and reported."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch

from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.device import pick_device, pick_dtype, pick_kv_dtype, pick_ops, plan_weights
from penstock.engine.kernels.interface import FP8
from penstock.engine.kv.allocator import BlockAllocator
from penstock.engine.kv.cache import KVCache
from penstock.engine.kv.pool import BlockPool
from penstock.engine.loading.fp8 import Fp8Checkpoint
from penstock.engine.memory import count_blocks, kv_shape
from penstock.engine.models.build import Weights, build_decoder
from penstock.engine.models.config import ModelConfig
from penstock.engine.request import EngineInfo, Request, SamplingParams
from penstock.engine.runner.runner import Runner
from penstock.engine.runner.warmup import Limits, compile_kernels
from penstock.engine.scheduler import Scheduler

Progress = Callable[[str, float], None]


class _Phases:
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


def load_engine(config: EngineConfig, progress: Progress | None, checkpoint: object | None) -> Engine:
    """See `Engine.load`."""
    phases = _Phases(progress)
    threads = config.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    on_cpu = device.type == "cpu"
    max_running = config.max_running or (64 if on_cpu else 256)
    budget = config.token_budget or (512 if on_cpu else 8192)
    with phases("open"):
        weights = _open(config, checkpoint)
        model = ModelConfig.from_hf(weights.config)
    with phases("kernels"):
        ops = pick_ops(device, threads)
        plan = plan_weights(config, ops, device, dtype, stored_fp8=isinstance(weights, Fp8Checkpoint))
        kv_dtype = pick_kv_dtype(config, device, dtype, ops)
    wanted_len = min(config.max_model_len or model.max_positions, model.max_positions)
    with phases("weights"), torch.inference_mode():
        decoder = build_decoder(
            weights,
            model,
            ops,
            device=device,
            dtype=dtype,
            max_positions=wanted_len,
            quantize=plan.quantize,
            inner=plan.inner,
            fused_up_to=plan.fused_up_to,
            fp8_cache=kv_dtype == FP8,
            progress=lambda fraction: phases.report("weights", fraction),
        )
    if ops.name == "triton":
        with phases("compile"):
            compile_kernels(decoder, kv_dtype, Limits(max_running, budget, wanted_len, config.block_size))
    with phases("kv cache"):
        num_blocks = count_blocks(
            config, decoder, kv_dtype, max_running=max_running, max_model_len=wanted_len, budget=budget
        )
        kv = KVCache(kv_shape(model, config.block_size, kv_dtype), num_blocks, device)
    pool = BlockPool(num_blocks)
    # One sequence must always fit alone, or it could neither run nor be preempted.
    max_model_len = min(wanted_len, pool.capacity * config.block_size)
    scheduler = Scheduler(
        BlockAllocator(pool, config.block_size, config.prefix_cache),
        max_running=max_running,
        token_budget=budget,
        max_model_len=max_model_len,
    )
    runner = Runner(decoder, kv, max_rows=max_running, max_model_len=max_model_len, block_size=config.block_size)
    info = EngineInfo(
        model=config.name or Path(config.model).name,
        instance=secrets.token_hex(8),
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        block_size=config.block_size,
        num_blocks=pool.capacity,
        max_running=max_running,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        startup=phases.seconds,
    )
    engine = Engine(config, info, scheduler, runner, overlap=not on_cpu)
    if runner.graphs is not None:
        with phases("graphs"):
            runner.graphs.capture_all()
    with phases("warm up"):
        _warm_up(engine)
    return engine


def _open(config: EngineConfig, checkpoint: object | None) -> Weights:
    if checkpoint is not None:
        return cast(Weights, checkpoint)
    from penstock.engine.loading.checkpoint import open_checkpoint

    return open_checkpoint(config.model)


def _warm_up(engine: Engine) -> None:
    """Run one tiny request through, so that the first user does not pay for lazy initialization."""
    request = Request("warm-up", [0, 0, 0], SamplingParams(max_tokens=2, temperature=0.0))
    engine.submit(request)
    while engine.has_work:
        engine.step()
    engine.reset_counters()
