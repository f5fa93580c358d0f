"""What one process holds of a model: its decoder and its KV cache, loaded phase by phase.

On one device that is the whole model. In an engine of several ranks each of them loads its own part with this code, as
a `Member` (`engine.parallel`).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from penstock.engine.adapters.runtime import AdaptedModel
from penstock.engine.backends.backend import Backend, WeightPlan
from penstock.engine.backends.interface import FP8, INT8, AttentionBatch, StepLimits
from penstock.engine.backends.select import pick_backend, pick_device, pick_dtype
from penstock.engine.config import EngineConfig
from penstock.engine.kv.cache import KVCache
from penstock.engine.loading.checkpoint import GGUFCheckpoint, SafetensorsCheckpoint
from penstock.engine.models.build import build_decoder
from penstock.engine.models.calibration import Forward, calibrate
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.families import read_config
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.tap import StageTap, Tap
from penstock.engine.models.transformers.decoder import TransformersDecoder
from penstock.engine.models.weights import Weights
from penstock.engine.startup.adapters import adapt_model, with_experts
from penstock.engine.startup.kernels import KernelBuild
from penstock.engine.startup.memory import (
    check_weights_fit,
    longest_sequence,
    size_cache,
    sliding_window,
    weights_fitting,
)
from penstock.errors import CheckpointError, ConfigError
from penstock.machine import usable_cores

if TYPE_CHECKING:
    from penstock.engine.parallel.member import Member
    from penstock.engine.parallel.site_parts import SiteShape

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


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """A decoder with its cache, and the limits it was made for."""

    backend: Backend
    model: ModelConfig
    """The whole model, also where `decoder` is a part of it."""
    decoder: Decoder
    kv: KVCache
    kv_dtype: torch.dtype
    """Of keys and values, also where this process has none."""
    max_running: int
    token_budget: int
    max_model_len: int
    """At most what one sequence with the whole cache can hold: a longer one could neither run nor be preempted."""
    adapters: AdaptedModel | None = None
    sites: tuple[SiteShape, ...] = ()
    """Of a model that `transformers` runs, on several ranks that hand blocks over: what all of them keep."""


def load_part(
    config: EngineConfig,
    checkpoint: object | None,
    phases: Phases,
    member: Member | None = None,
    *,
    backend: Backend | None = None,
    beside: int = 0,
    own_cache: bool = True,
    tap: Tap | None = None,
) -> Part:
    """Read the checkpoint and make decoder and cache; `checkpoint` replaces the one that `config` names.

    `backend`: to share with another model in this process. `beside`: bytes that every block needs elsewhere.
    `own_cache`: or else the cache is made later, like another model's; until then it has one block. `tap`: what a
    drafter in this process wants of it.
    """
    threads = config.threads or max(1, usable_cores() // (1 if member is None else member.neighbours))
    torch.set_num_threads(threads)
    device = pick_device(config.device)
    if member is not None:
        device = member.device(device)
    dtype = pick_dtype(config.dtype, device)
    with phases("open"):
        weights = whole = open_weights(config, checkpoint)
        model = local = read_config(weights.config)
        if model.by_transformers:
            check_by_transformers(config, model, weights)
        head_rows = None
        if member is not None and model.by_transformers:
            member.check(model)  # the library cuts it
        elif member is not None:
            weights, local, head_rows = member.cut(
                weights, model, config.expert_copies if config.expert_parallel else None
            )
        elif isinstance(weights, SafetensorsCheckpoint) and not model.by_transformers:
            weights.begin(device)  # while kernels are imported
    with phases("kernels"):
        backend = backend or pick_backend(device, threads)
        if config.deterministic:
            check_deterministic(config, model, backend)
            backend.ops.batch_invariant = True
        plan = backend.plan_weights(config, dtype, weights)
        kv_dtype = backend.kv_dtype(config, model, dtype)
        max_running = config.max_running or backend.defaults.max_running
        budget = config.token_budget or backend.defaults.token_budget
        wanted_len = min(config.max_model_len or model.max_positions, model.max_positions)
        if config.fp8_attention:
            with nullcontext() if own_cache else suppress(ConfigError):  # a draft model may have other heads
                backend.attend_in_fp8(model, dtype, kv_dtype, min(budget, wanted_len))
    if member is not None:
        with phases("ranks"):
            member.meet(backend)
            forms = "as stored" if plan.quantize is None else type(plan.quantize).__name__
            member.agree(
                {
                    "dtype": str(dtype),
                    "kv_dtype": str(kv_dtype),
                    "weights": forms,
                    "max_running": max_running,
                    "token_budget": budget,
                }
            )
    if config.max_model_len is not None and wanted_len < config.max_model_len:
        _log.warning(
            "max_model_len is %d, but the model has %d positions: its window is %d tokens",
            config.max_model_len,
            wanted_len,
            wanted_len,
        )
    if backend.in_host_memory and not model.by_transformers:
        check_weights_fit(config, whole, plan, dtype, backend.memory.available())
    most_decodes = max(max_running, config.max_verified(max_running))
    limits = StepLimits(most_decodes, budget, wanted_len, config.block_size)
    # With shards, sums stand between linears and residual additions.
    alone = member is None or member.place.tensor == 1
    leads = member is None or member.place.rank == 0  # what holds for all ranks is said once
    with KernelBuild(backend, kv_dtype, limits) as kernels, _read(weights):
        with phases("weights"), torch.inference_mode(), weights_fitting(config, backend):
            decoder = _by_transformers(
                config, weights, model, backend, dtype, wanted_len, plan, phases, member
            ) or build_decoder(
                weights,
                local,
                backend,
                dtype=dtype,
                max_positions=wanted_len,
                quantize=plan.quantize,
                asked="" if config.weights in ("auto", "dense") or not leads else config.weights,
                inner=plan.inner,
                fused_up_to=plan.fused_up_to,
                fp8_cache=kv_dtype == FP8,
                head_rows=head_rows,
                progress=lambda fraction: phases.report("weights", fraction),
                begun=kernels.begin if backend.compiles and member is None else None,
            )
        if model.by_transformers:
            model = decoder.config  # its windows were found meanwhile
        if backend.calibrates and (kv_dtype == INT8 or plan.quantize is not None):
            with phases("calibration"):
                together = None if member is None else _together(member, decoder)
                kept = None if member is None else member.calibration
                decoder = calibrate(decoder, backend, int8_cache=kv_dtype == INT8, together=together, kept=kept)
        cut = None
        if member is not None and not model.by_transformers:
            experts = with_experts(config, backend)
            cut = member.adapter_cut(model, experts=experts, whole_experts=config.expert_parallel)
        adapters = adapt_model(
            config,
            backend,
            decoder,
            dtype=dtype,
            cut=cut,
            head_rows=head_rows,
            as_stored=not isinstance(weights, GGUFCheckpoint),
            stored=whole,
            anywhere=bool if member is None else member.anywhere,
        )
        if backend.compiles and not model.by_transformers:  # the library's code launches its own
            with phases("compile"):
                kernels.finish(decoder if alone else dataclasses.replace(decoder, fused_up_to=0), adapters)
    stage_tap = _stage_tap(tap, model, member)
    with phases("kv cache"):
        if member is not None and config.ranks_per_device > 1:
            member.least(0)  # none measures what is free before all have loaded
        num_blocks, num_states = size_cache(
            config if own_cache else replace(config, num_blocks=1),
            backend,
            _tapped(decoder, stage_tap),
            kv_dtype,
            max_running=max_running,
            max_model_len=wanted_len,
            budget=budget,
            beside=beside,
            apart=0 if adapters is None else adapters.beside,
            graphs=backend.graph_bytes(decoder, limits) if member is None or member.captures else 0,
        )
        shape = _tapped(decoder, stage_tap).cache_shape(config.block_size, kv_dtype)
        if model.recurrent or not shape.blocks_suffice:
            check_stateful(config)
        sites: tuple[SiteShape, ...] = ()
        if member is not None:
            if isinstance(decoder, TransformersDecoder) and config.role != "both":
                from penstock.engine.parallel.site_parts import agreed_sites

                sites = agreed_sites(decoder.hidden.sites, member.place, member.least)
            num_blocks, num_states = member.least(num_blocks, "KV blocks"), member.least(num_states, "states")
            decoder = member.connect(decoder)
            adapters = None if adapters is None else adapters.with_decoders(member.connect)
        adapters = None if adapters is None else adapters.with_altered()
        if stage_tap is not None:
            decoder = stage_tap.on(decoder)
            adapters = None if adapters is None else adapters.with_decoders(stage_tap.on)
        kv = KVCache(shape, num_blocks, device, num_states)
    max_model_len = longest_sequence(wanted_len, num_blocks, config.block_size, sliding_window(model, budget))
    if max_model_len < wanted_len and own_cache:
        _log.warning(
            "the KV cache has room for %d tokens: the window is that, not %d; raise kv_memory or memory_share",
            max_model_len,
            wanted_len,
        )
    return Part(backend, model, decoder, kv, kv_dtype, max_running, budget, max_model_len, adapters, sites)


@contextmanager
def _read(weights: Weights) -> Iterator[None]:
    """Behind it, whether the model was loaded or not, nothing more is read ahead: the memory is the cache's."""
    try:
        yield
    finally:
        if isinstance(weights, SafetensorsCheckpoint):
            weights.end()


def _tapped(decoder: Decoder, tap: Tap | StageTap | None) -> Decoder:
    return decoder if tap is None else tap.on(decoder)


def _stage_tap(tap: Tap | None, model: ModelConfig, member: Member | None) -> Tap | StageTap | None:
    """In a pipeline, or with sequences of its own: this rank's part of it."""
    if tap is None or member is None or (member.place.pipeline == 1 and not member.place.data):
        return tap
    from penstock.engine.parallel.layout import stage_span

    return tap.of_stage(*stage_span(model, member.place), model.num_layers)


def _together(member: Member, decoder: Decoder) -> Forward:
    """A pass through the parts of all ranks, of which this one has `decoder`."""
    from penstock.engine.parallel.decoder import Stage
    from penstock.engine.parallel.member import GONE

    stage = Stage(member.connect(decoder), member.groups)

    def forward(token_ids: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        try:
            return stage.whole(token_ids, batch, kv)
        except GONE as error:
            raise member.loss(error) from error

    return forward


def check_deterministic(config: EngineConfig, model: ModelConfig, backend: Backend) -> None:
    """Refuse what has no batch-invariant kernels yet."""
    moves = not model.by_transformers  # their experts stay where they are
    if config.expert_parallel and moves and (config.expert_copies or config.expert_rebalance_s):
        raise ConfigError(
            "deterministic: true with expert_parallel needs expert_copies: 0 and expert_rebalance_s: 0, because sums "
            "depend on which shard has an expert"
        )
    if (config.adapters or config.adapter_slots) and not backend.invariant_adapters:
        raise ConfigError("deterministic: true is not available with adapters on this device")
    if config.fp8_attention:
        raise ConfigError("deterministic: true attends token by token, never in FP8: remove fp8_attention")


def check_by_transformers(config: EngineConfig, model: ModelConfig, weights: Weights) -> None:
    """Refuse what models that the `transformers` library runs do not have."""
    refused = {
        "expert_copies": config.expert_copies > 0,
        "rank_restarts, with attention_parallel: data": config.rank_restarts and config.attention_parallel == "data",
    }
    for name, is_set in refused.items():
        if is_set:
            raise ConfigError(f"{name}: not available for {model.family} models, which run through transformers")
    if _folder_of(weights) is None:
        raise CheckpointError(
            f"{model.family} models run through transformers, which needs a folder of safetensors; GGUF files are read "
            "for families that we have"
        )


def _folder_of(weights: Weights) -> Path | None:
    """Where a checkpoint's safetensors are; None for one that has none."""
    folder: Path | None = getattr(weights, "folder", None)
    return folder


def _by_transformers(
    config: EngineConfig,
    weights: Weights,
    model: ModelConfig,
    backend: Backend,
    dtype: torch.dtype,
    max_positions: int,
    plan: WeightPlan,
    phases: Phases,
    member: Member | None,
) -> Decoder | None:
    """The decoder of a model that no family describes, or this rank's part of it; None for all others."""
    if not model.by_transformers:
        return None
    from penstock.engine.models.transformers.cuts import Shard
    from penstock.engine.models.transformers.load import load_decoder

    span = shard = sums = None
    if member is not None:
        from penstock.engine.parallel.dispatch import exchanged_between
        from penstock.engine.parallel.layout import stage_span

        place, group = member.place, member.groups.tensor
        exchange = exchanged_between(group) if group is not None and place.data else None
        span = stage_span(model, place) if place.pipeline > 1 else None
        if group is not None:
            sums = member.loading_sums()
            shard = Shard(place.shard, place.tensor, sums or member.summed, member.least, backend.device, exchange)

    folder, plain = _folder_of(weights), isinstance(weights, SafetensorsCheckpoint)
    assert folder is not None, "checked before weights are read"
    decoder = load_decoder(
        folder,
        model,
        weights.config,
        backend,
        dtype=dtype,
        max_positions=max_positions,
        quantize=plan.quantize,
        stored=None if plain else weights,
        custom_code=config.trust_remote_code,
        span=span,
        shard=shard,
        alone=config.deterministic,
        experts=config.expert_parallel,
        progress=lambda fraction: phases.report("weights", fraction),
    )
    if sums is not None:
        sums.loaded()
    return decoder


def check_stateful(config: EngineConfig) -> None:
    """Refuse what cannot keep states of sequences."""
    if config.state_interval < 1 or config.state_interval % config.block_size:
        raise ConfigError(
            f"state_interval: {config.state_interval} is not a multiple of block_size {config.block_size}"
        )
    if config.role != "both" and config.kept_states == 0:
        raise ConfigError(
            f"role: {config.role}: prompts are handed over with their state, and kept_states: 0 keeps none"
        )


def open_weights(config: EngineConfig, checkpoint: object | None) -> Weights:
    """`checkpoint`, or the one that `config` names."""
    if checkpoint is not None:
        return cast(Weights, checkpoint)
    from penstock.engine.loading.checkpoint import open_checkpoint
    from penstock.engine.loading.random_checkpoint import possible_tensors

    opened = open_checkpoint(config.model)
    if isinstance(opened, GGUFCheckpoint):
        opened.refuse_others(possible_tensors(opened.config))
    return opened
