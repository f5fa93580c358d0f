"""Building an engine around what `part` has loaded: scheduler, runner, warm-up."""

from __future__ import annotations

import secrets
from pathlib import Path

from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.grammar.constraints import MakeCompiler
from penstock.engine.kv.allocator import BlockAllocator
from penstock.engine.kv.pool import BlockPool
from penstock.engine.part import Phases, Progress, load_part
from penstock.engine.request import EngineInfo, Request, SamplingParams
from penstock.engine.runner.runner import Runner
from penstock.engine.scheduler import Scheduler
from penstock.engine.speculative.setup import load_draft, make_speculation


def load_engine(
    config: EngineConfig, progress: Progress | None, checkpoint: object | None, grammars: MakeCompiler | None = None
) -> Engine:
    """See `Engine.load`."""
    phases = Phases(progress)
    draft = load_draft(config, phases)
    part = load_part(
        config,
        checkpoint,
        phases,
        ops=None if draft is None else draft.decoder.ops,
        beside=0 if draft is None else draft.kv.shape.block_bytes,
    )
    pool = BlockPool(part.kv.num_blocks)
    scheduler = Scheduler(
        BlockAllocator(pool, config.block_size, config.prefix_cache),
        max_running=part.max_running,
        token_budget=part.token_budget,
        max_model_len=part.max_model_len,
        adapters=part.adapters.pool if part.adapters is not None else None,
    )
    runner = Runner(
        part.decoder,
        part.kv,
        max_rows=part.max_running,
        max_model_len=part.max_model_len,
        block_size=config.block_size,
        max_verified=config.max_verified(part.max_running),
        adapters=part.adapters,
    )
    info = EngineInfo(
        model=config.name or Path(config.model).name,
        instance=secrets.token_hex(8),
        max_model_len=part.max_model_len,
        vocab_size=part.model.vocab_size,
        block_size=config.block_size,
        num_blocks=pool.capacity,
        max_running=part.max_running,
        device=str(part.kv.device),
        dtype=str(part.decoder.embedding.dtype).removeprefix("torch."),
        startup=phases.seconds,
    )
    overlap = part.kv.device.type != "cpu"
    speculation = make_speculation(config, part, draft, scheduler, overlap=overlap)
    engine = Engine(config, info, scheduler, runner, overlap=overlap, grammars=grammars, speculation=speculation)
    runner.record(part.token_budget)
    if runner.graphs is not None:
        with phases("graphs"):
            runner.graphs.capture_all()
            if runner.adapted_graphs is not None:
                runner.adapted_graphs.capture_all()
    with phases("warm up"):
        _warm_up(engine)
    return engine


def _warm_up(engine: Engine) -> None:
    """Run one tiny request through, so that the first user does not pay for lazy initialization."""
    request = Request("warm-up", [0, 0, 0], SamplingParams(max_tokens=2, temperature=0.0))
    engine.submit(request)
    while engine.has_work:
        engine.step()
    engine.reset_counters()
