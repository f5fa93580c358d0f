"""Building an engine around what `part` has loaded: scheduler, runner, warm-up; and the other ranks, if any."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.engine.adapters.runtime import AdapterRuntime
from penstock.engine.backends.interface import StepDefaults
from penstock.engine.backends.select import pick_device
from penstock.engine.config import EngineConfig
from penstock.engine.core import Balancer, Engine
from penstock.engine.grammar.constraints import MakeCompiler
from penstock.engine.kv.allocator import BlockAllocator
from penstock.engine.kv.block_file import OneFile
from penstock.engine.kv.block_numbers import CacheMover, Numbering
from penstock.engine.kv.disk import BlockStore, DiskTier
from penstock.engine.kv.exchange import BlockExchange, SpreadCache
from penstock.engine.kv.format import kv_format
from penstock.engine.kv.host import HostTier
from penstock.engine.kv.kept_folder import KeptSlot
from penstock.engine.kv.mover import BlockMover
from penstock.engine.kv.partition import PartitionedAllocator
from penstock.engine.kv.persistence import Persistence
from penstock.engine.kv.pool import BlockPool
from penstock.engine.kv.states import StateStore
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.attention import Attention
from penstock.engine.pace import Pace
from penstock.engine.request import EngineInfo, Request, SamplingParams
from penstock.engine.runner.runner import Runner
from penstock.engine.scheduler import Scheduler
from penstock.engine.speculative.setup import load_draft, make_speculation, spread_draft
from penstock.engine.startup.adapters import adapter_rank, manage_adapters, with_vectors
from penstock.engine.startup.kept_files import mark_weights
from penstock.engine.startup.memory import sliding_window
from penstock.engine.startup.offload import Tiers, check_tiers, open_tiers
from penstock.engine.startup.part import Part, Phases, Progress, load_part
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.engine.parallel.launch import Ranks
    from penstock.engine.parallel.machines import Machines

log = logging.getLogger(__name__)


def load_engine(
    config: EngineConfig,
    progress: Progress | None,
    checkpoint: object | None,
    grammars: MakeCompiler | None = None,
    find_adapter: Callable[[str], Path] = Path,
    machines: Machines | None = None,
) -> Engine:
    """See `Engine.load`."""
    check_tiers(config)
    if checkpoint is not None and config.disk_persistent:
        raise ConfigError("disk_persistent: weights that exist in memory only could not be known again")
    # Once, for all ranks.
    config = spread_draft(
        replace(config, adapter_rank=adapter_rank(config), adapter_vectors=with_vectors(config)), checkpoint
    )
    if config.ranks == 1:
        if config.expert_parallel or config.attention_parallel == "data":
            raise ConfigError("expert_parallel: experts are spread over tensor_parallel devices; there is only one")
        with ExitStack() as undo:
            engine = _assemble(config, checkpoint, grammars, find_adapter, Phases(progress), None, undo)
            undo.pop_all()
            return engine
    if config.attention_parallel == "data" and not config.expert_parallel:
        raise ConfigError("attention_parallel: data is for expert_parallel: true; else run replicas of the model")
    if config.rank_restarts:
        _check_restarts(config)
    from penstock.engine.parallel.launch import Ranks

    ranks = Ranks(config, checkpoint, machines)
    with ExitStack() as undo:
        undo.callback(ranks.close, grace_s=0.0)
        engine = _assemble(config, checkpoint, grammars, find_adapter, Phases(progress), ranks, undo)
        undo.pop_all()
        return engine


def _check_restarts(config: EngineConfig) -> None:
    """Refuse what a rank that is started again would have to be told, or to run with the others while it loads."""
    refused = {
        "CUDA devices": pick_device(config.device).type != "cpu",
    }
    for name, is_set in refused.items():
        if is_set:
            raise ConfigError(f"rank_restarts is not available with {name}: there the engine restarts as a whole")


def _assemble(
    config: EngineConfig,
    checkpoint: object | None,
    grammars: MakeCompiler | None,
    find_adapter: Callable[[str], Path],
    phases: Phases,
    ranks: Ranks | None,
    undo: ExitStack,
) -> Engine:
    """`undo`: is told what to do should this fail; the process may go on, as one that could not be woken does."""
    before = mark_weights(config)
    draft = load_draft(config, checkpoint, phases, ranks)
    part = load_part(
        config,
        checkpoint,
        phases,
        ranks,
        backend=None if draft is None else draft.backend,
        beside=0 if draft is None else draft.block_bytes,
        tap=None if draft is None else draft.tap,
    )
    behind = _behind(config, part, ranks, phases, before)
    undo.callback(behind.close)
    adapters = None if part.adapters is None else manage_adapters(config, part.adapters, find_adapter, ranks)
    pipelined = config.pipeline_parallel > 1
    allocator = _allocator(config, part, behind)
    scheduler = Scheduler(
        allocator,
        max_running=part.max_running,
        token_budget=part.token_budget,
        max_model_len=part.max_model_len,
        adapters=adapters.pool if adapters is not None else None,
        batches=config.pipeline_parallel + part.backend.overlaps if pipelined else 1,
        pace=_pace(config, part.backend.defaults),
    )
    runner = Runner(
        part.backend,
        part.decoder if ranks is None else _lead(part, ranks, adapters),
        part.kv,
        max_rows=part.max_running,
        max_model_len=part.max_model_len,
        block_size=config.block_size,
        max_verified=config.max_verified(part.max_running),
        adapters=adapters,
        several_ranks=ranks is not None,
        deferred=pipelined,
        deterministic=config.deterministic,
        mover=behind.mover,
        state_mover=behind.state_mover,
    )
    info = EngineInfo(
        model=config.name or Path(config.model).name,
        instance=secrets.token_hex(8),
        max_model_len=part.max_model_len,
        vocab_size=part.model.vocab_size + (0 if adapters is None else adapters.room),
        block_size=config.block_size,
        num_blocks=allocator.pool.capacity,
        max_running=part.max_running,
        device=str(part.kv.device),
        product=part.backend.product,
        dtype=str(part.decoder.embedding.dtype).removeprefix("torch."),
        ranks=config.ranks,
        startup=phases.seconds,
        role=config.role,
        kv_format=_kv_format(config, part, ranks),
        weight_bytes=part.decoder.weight_bytes,
        kv_bytes=sum(tensor.nbytes for tensor in (*part.kv.tensors, *part.kv.states)),
        runs_through="transformers" if part.model.by_transformers else "",
    )
    overlap = part.backend.overlaps
    # In a pipeline no step waits for another's tokens, whether it verifies or not.
    speculation = make_speculation(config, part, draft, scheduler, ranks, overlap=overlap and not pipelined)
    engine = Engine(
        config, info, scheduler, runner, overlap=overlap, grammars=grammars, speculation=speculation, ranks=ranks
    )
    if info.kv_format:
        engine.exchange = BlockExchange(
            scheduler.allocator,
            part.kv,
            part.backend,
            spread=None if ranks is None else _spread(part, ranks),
            step_tokens=part.token_budget,
            version=lambda name: None if scheduler.adapters is None else scheduler.adapters.version(name),
            virtual=lambda name: [] if scheduler.adapters is None else scheduler.adapters.virtual_tokens(name),
            flush=[mover.run for mover in behind.movers(part)],
            flush_states=[mover.run for mover in behind.state_movers(part)],
        )
        if ranks is not None:
            ranks.when_lost.append(engine.exchange.start_over)
    if ranks is not None and config.expert_parallel:
        if not part.model.by_transformers:
            engine.balancer = _balancer(config, part, ranks)
        elif config.expert_rebalance_s:
            log.warning(
                "expert_rebalance_s has no effect: experts of %s models, which run through transformers, do not move",
                part.model.family,
            )
    executor = runner.executor
    with phases(executor.phase) if executor.phase else nullcontext():
        executor.prepare(part.token_budget)
    with phases("warm up"):
        _warm_up(engine)
    if behind.slot is not None:
        with phases("disk"):
            engine.persistence = _persistence(engine, part, behind, behind.slot)
    if engine.adapters is not None:
        engine.adapters.preload()
    return engine


def _persistence(engine: Engine, part: Part, behind: Behind, slot: KeptSlot) -> Persistence:
    persistence = Persistence(
        engine.scheduler.allocator,
        list(zip(behind.hosts, behind.movers(part), strict=True)),
        list(zip(behind.state_hosts, behind.state_movers(part), strict=True)),
        slot,
    )
    persistence.restore()
    return persistence


def _kv_format(config: EngineConfig, part: Part, ranks: Ranks | None) -> str:
    """Identifies the engines whose blocks this one can use; empty where none are exchanged."""
    if config.role == "both":
        return ""
    if not config.prefix_cache:
        raise ConfigError(f"role: {config.role} hands over blocks by name, which prefix_cache: false forbids")
    mixers = [layer.mixer for layer in part.decoder.layers]
    smoothed = any(isinstance(mixer, Attention) and mixer.key_smoothing for mixer in mixers)
    shape = part.kv.shape if ranks is None else _spread(part, ranks).shape
    return kv_format(config, shape, str(part.decoder.embedding.dtype).removeprefix("torch."), smoothed)


def _spread(part: Part, ranks: Ranks) -> SpreadCache:
    """Whole blocks of an engine whose ranks have a part of each."""
    from penstock.engine.parallel.blocks import spread_cache
    from penstock.engine.parallel.site_parts import cache_parts

    return spread_cache(cache_parts(part, ranks.place), part.kv, ranks, part.backend.block_mover)


def _lead(part: Part, ranks: Ranks, adapters: AdapterRuntime | None) -> Decoder:
    from penstock.engine.parallel.data import shares_of
    from penstock.engine.parallel.decoder import lead, lead_adapted

    width, shares = -(-part.max_model_len // part.kv.block_size), shares_of(ranks.place, part.kv, part.max_running)
    decoder = lead(part.decoder, ranks, part.max_running + 1, width, shares=shares)
    if adapters is not None:
        lead_adapted(decoder, adapters)
    return decoder


def _pace(config: EngineConfig, defaults: StepDefaults) -> Pace:
    if config.target_gap_ms is not None:
        return Pace(config.target_gap_ms / 1e3, tile=defaults.prompt_tile)
    return Pace(defaults.gap_s, default=True, yields_s=defaults.gap_yields_s, tile=defaults.prompt_tile)


def _allocator(config: EngineConfig, part: Part, behind: Behind) -> BlockAllocator:
    """The blocks of the KV cache; of those of all shards, where each has sequences of its own."""
    window = sliding_window(part.model, part.token_budget)
    recurrent = part.model.recurrent or not part.kv.shape.blocks_suffice

    def one(cache: int) -> BlockAllocator:
        states = _states(config, part, behind.state_host(cache)) if recurrent else None
        pool = BlockPool(part.kv.num_blocks, behind.host(cache))
        return BlockAllocator(pool, config.block_size, config.prefix_cache, window, states)

    if config.attention_parallel == "tensor":
        return one(0)
    return PartitionedAllocator([one(cache) for cache in range(_caches(config))])


def _states(config: EngineConfig, part: Part, host: HostTier | None) -> StateStore:
    """The states of recurrent layers."""
    return StateStore(
        BlockPool(part.kv.num_states, host),
        rows=part.max_running,
        block_size=config.block_size,
        interval=config.state_interval,
        keeps=config.prefix_cache,
    )


def _balancer(config: EngineConfig, part: Part, ranks: Ranks) -> Balancer:
    from penstock.engine.parallel.experts import make_balancer

    return make_balancer(part.decoder, part.model, ranks, config.expert_copies, config.expert_rebalance_s)


@dataclass(frozen=True, slots=True)
class Behind:
    """The tiers behind the caches, of blocks and of states, as far as they are configured."""

    hosts: tuple[HostTier, ...] = ()
    """By cache: several where shards have sequences of their own."""
    mover: BlockMover | None = None
    """Makes the copies of all of them."""
    state_hosts: tuple[HostTier, ...] = ()
    state_mover: BlockMover | None = None
    slot: KeptSlot | None = None
    """Where blocks on disk outlive the engine."""

    def close(self) -> None:
        for host in (*self.hosts, *self.state_hosts):
            if host.disk is not None:
                host.disk.close()
        if self.slot is not None:
            self.slot.close()

    def host(self, cache: int) -> HostTier | None:
        return self.hosts[cache] if self.hosts else None

    def state_host(self, cache: int) -> HostTier | None:
        return self.state_hosts[cache] if self.state_hosts else None

    def movers(self, part: Part) -> list[BlockMover]:
        """By cache: what makes the copies of its blocks."""
        return _by_cache(self.mover, self.hosts, part.kv.num_blocks)

    def state_movers(self, part: Part) -> list[BlockMover]:
        return _by_cache(self.state_mover, self.state_hosts, part.kv.num_states)


def _by_cache(mover: BlockMover | None, hosts: tuple[HostTier, ...], blocks: int) -> list[BlockMover]:
    if mover is None:
        return []
    if len(hosts) == 1:
        return [mover]
    return [CacheMover(mover, Numbering(blocks, host.capacity), cache) for cache, host in enumerate(hosts)]


def _behind(config: EngineConfig, part: Part, ranks: Ranks | None, phases: Phases, before: str) -> Behind:
    with phases("host memory") if config.host_memory else nullcontext():
        tiers = open_tiers(config, part, ranks, before)
    if tiers is None:
        return Behind()

    step_bytes, shape = part.backend.restore_step_bytes, part.kv.shape

    def host(slots: int, places: int, store: BlockStore | None, size: int) -> HostTier:
        disk = None if store is None else DiskTier(places, store, persistent=tiers.slot is not None)
        at_once = None if step_bytes is None else max(1, step_bytes // max(1, size))
        return HostTier(slots, config.host_idle_s, disk, at_once)

    caches = range(_caches(config))
    hosts = tuple(host(tiers.slots, tiers.places, _store(tiers, ranks, cache), shape.block_bytes) for cache in caches)
    mover = _leading(tiers.mover, ranks)
    if tiers.state_mover is None:
        return Behind(hosts, mover, slot=tiers.slot)
    states = tuple(
        host(tiers.states, tiers.state_places, _state_store(tiers, ranks, cache), shape.state_bytes) for cache in caches
    )
    return Behind(hosts, mover, states, _leading(tiers.state_mover, ranks, states=True), tiers.slot)


def _caches(config: EngineConfig) -> int:
    """How many caches there are with sequences of their own."""
    return config.tensor_parallel if config.attention_parallel == "data" else 1


def _store(tiers: Tiers, ranks: Ranks | None, cache: int) -> BlockStore | None:
    """The files of a cache's blocks."""
    if tiers.file is None or ranks is None:
        return None if tiers.file is None else OneFile(tiers.file)
    from penstock.engine.parallel.blocks import BLOCKS
    from penstock.engine.parallel.files import lead_files

    rows = tiers.row_files[cache : cache + 1]
    return lead_files(tiers.file, ranks, cache, BLOCKS, rows)


def _state_store(tiers: Tiers, ranks: Ranks | None, cache: int) -> BlockStore | None:
    if tiers.state_file is None or ranks is None:
        return None if tiers.state_file is None else OneFile(tiers.state_file)
    from penstock.engine.parallel.blocks import STATES
    from penstock.engine.parallel.files import lead_files

    return lead_files(tiers.state_file, ranks, cache, STATES)


def _leading(mover: BlockMover, ranks: Ranks | None, *, states: bool = False) -> BlockMover:
    if ranks is None:
        return mover
    from penstock.engine.parallel.blocks import LeadMover

    return LeadMover(mover, ranks, states=states)


def _warm_up(engine: Engine) -> None:
    """Run one tiny request through, so that the first user does not pay for lazy initialization."""
    request = Request("warm-up", [0, 0, 0], SamplingParams(max_tokens=2, temperature=0.0))
    engine.submit(request)
    while engine.has_work:
        engine.step()
    engine.reset_counters()
