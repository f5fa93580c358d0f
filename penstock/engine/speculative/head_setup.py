"""A drafter's head beside its target: loaded before it, and put to work over what the target keeps of its tokens.

With several ranks rank 0 has the head alone. Every shard has the whole residual stream, so nothing has to be sent
between them; what is read in later stages of a pipeline comes back with the final hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from penstock.engine.backends.backend import Backend
from penstock.engine.backends.interface import StepLimits
from penstock.engine.backends.select import pick_backend, pick_device, pick_dtype
from penstock.engine.config import EngineConfig
from penstock.engine.kv.cache import CacheShape, KVCache
from penstock.engine.loading.checkpoint import read_json
from penstock.engine.models.build import compose_head
from penstock.engine.models.decoder import DecoderLayer
from penstock.engine.models.families import read_config
from penstock.engine.models.layers.linear import Linear, shaped
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.tap import Tap
from penstock.engine.models.weights import WeightReader, Weights
from penstock.engine.runner.runner import Runner
from penstock.engine.scheduler import Scheduler
from penstock.engine.speculative.draft import FOLLOWED
from penstock.engine.speculative.eagle3 import load_eagle3, read_eagle3_config
from penstock.engine.speculative.head_decoder import HeadDecoder
from penstock.engine.speculative.head_proposer import HeadProposer
from penstock.engine.speculative.mtp import load_mtp, mtp_tap
from penstock.engine.startup.part import Part, Phases, open_weights
from penstock.errors import CheckpointError, ConfigError
from penstock.machine import usable_cores

if TYPE_CHECKING:
    from penstock.engine.parallel.member import Member

HEADS = ("eagle3", "mtp")
"""Forms of speculation whose drafter reads hidden states of the model."""


class Head(Protocol):
    """A head's weights on the device."""

    @property
    def tap(self) -> Tap:
        """What the target has to keep for it."""
        ...

    @property
    def layer(self) -> DecoderLayer: ...

    @property
    def needs_head(self) -> bool:
        """Whether it has none of its own, and uses the target's."""
        ...

    def decoder(self, backend: Backend, features: Tensor, block_size: int, embedding: Tensor, head: Linear,
                max_positions: int) -> HeadDecoder:  # fmt: skip
        """The drafter over what a target keeps (`features`), with the target's embedding and head where it has none."""
        ...


@dataclass(frozen=True, slots=True)
class HeadDraft:
    """A head that waits for its target."""

    backend: Backend
    head: Head
    shape: CacheShape
    weights: Weights
    """The target's, whole."""
    caches: int = 1
    """Of the target, where shards have sequences of their own: their blocks are numbered through."""

    @property
    def tap(self) -> Tap:
        return replace(self.head.tap, caches=self.caches)

    @property
    def block_bytes(self) -> int:
        """What its own cache needs beside every block of the target; what the target keeps for it is the target's."""
        return self.shape.block_bytes * self.caches


def load_head(
    config: EngineConfig, checkpoint: object | None, phases: Phases, member: Member | None
) -> HeadDraft | None:
    """On rank 0: the head that the configuration names, or that the checkpoint has."""
    if member is not None and member.place.rank > 0:
        return None
    threads = config.threads or max(1, usable_cores() // (1 if member is None else member.neighbours))
    device = pick_device(config.device)
    if member is not None:
        device = member.device(device)
    dtype = pick_dtype(config.dtype, device)
    with phases("draft head"), torch.inference_mode():
        torch.set_num_threads(threads)
        backend = pick_backend(device, threads)
        weights = open_weights(config, checkpoint)
        target = read_config(weights.config)
        if target.by_transformers:
            raise ConfigError(
                f"speculation: {config.speculation} is not available for {target.family} models, which run through "
                "transformers; use ngram or draft"
            )
        if target.cycles is not None:
            raise ConfigError(
                f"speculation: {config.speculation} is not available for {target.family} models, whose layers run "
                "several times for each token; use ngram or draft"
            )
        if target.streams is not None and config.speculation == "eagle3":
            raise ConfigError(
                f"speculation: eagle3 is not available for {target.family} models: a head reads one residual stream, "
                f"and these have {target.streams.count}; use ngram or draft"
            )
        positions = min(config.max_model_len or target.max_positions, target.max_positions)
        try:
            head = _read(config, weights, target, backend, dtype, positions)
        except CheckpointError as error:
            where = "draft_model" if config.speculation == "eagle3" else "speculation: mtp"
            raise ConfigError(f"{where}: {error}") from error
    kind = head.layer.mixer.cache_kind(config.block_size, dtype)
    caches = config.tensor_parallel if config.attention_parallel == "data" else 1
    return HeadDraft(backend, head, CacheShape((kind,), config.block_size), weights, caches)


def distant_tap(config: EngineConfig, checkpoint: object | None, member: Member) -> Tap | None:
    """On a rank of a later stage, through which streams pass to the head, or with sequences of its own: which of them
    it reads. Final hidden states go to rank 0 anyway."""
    place = member.place
    passes = place.data or (place.pipeline > 1 and not place.shard)
    if config.speculation not in HEADS or not passes:
        return None
    target = read_config(open_weights(config, checkpoint).config)
    if config.speculation == "mtp":
        tap = mtp_tap(target)
        return replace(tap, width=0) if tap.layers else None
    if config.draft_model is None:
        return None
    return Tap(0, layers=read_eagle3_config(read_json(Path(config.draft_model) / "config.json"), target).tapped)


def _read(
    config: EngineConfig, weights: Weights, target: ModelConfig, backend: Backend, dtype: torch.dtype, positions: int
) -> Head:
    if config.speculation == "mtp":
        return load_mtp(weights, target, backend, dtype, backend.plan_weights(config, dtype, weights), positions)
    if config.draft_model is None:
        raise ConfigError("speculation: eagle3 needs a draft_model, the source of the head")
    return load_eagle3(Path(config.draft_model), target, backend, dtype, positions)


def head_proposer(config: EngineConfig, target: Part, draft: HeadDraft, scheduler: Scheduler) -> HeadProposer:
    """The head at work beside `target`, which keeps what it taps."""
    backend, embedding, head = draft.backend, target.decoder.embedding, target.decoder.head
    if config.tensor_parallel > 1 and draft.head.needs_head:
        head = _whole_head(draft, target)
    positions = target.decoder.max_positions
    decoder = draft.head.decoder(backend, target.kv.layers[-1], config.block_size, embedding, head, positions)
    kv = KVCache(draft.shape, target.kv.num_blocks * draft.caches, target.kv.device)
    most = config.max_verified(target.max_running)
    if backend.compiles:
        limits = StepLimits(max(target.max_running, most), target.token_budget, positions, config.block_size)
        backend.compile(decoder, decoder.embedding.dtype, limits, None)
    runner = Runner(
        backend,
        decoder,
        kv,
        max_rows=target.max_running,
        max_model_len=target.max_model_len,
        block_size=config.block_size,
        max_verified=most,
        followed=FOLLOWED,
        scores_prompts=False,
        drawn_ahead=max(config.speculation_depth - 1, 0),
    )
    runner.executor.prepare(target.token_budget)
    return HeadProposer(runner, scheduler, window=target.max_model_len, budget=target.token_budget)


def _whole_head(draft: HeadDraft, target: Part) -> Linear:
    """The head of a target that is cut, whole: one of its own spares the drafter the other ranks."""
    model, backend = target.model, draft.backend
    read = WeightReader(draft.weights, backend, target.decoder.embedding.dtype)
    return shaped(backend.as_head(compose_head(read, model, model.vocab_size)), model.logit_scale, model.logit_softcap)
