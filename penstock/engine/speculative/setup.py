"""Speculation as the configuration asks for it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

from penstock.engine.config import EngineConfig
from penstock.engine.kv.cache import KVCache
from penstock.engine.runner.runner import Runner
from penstock.engine.scheduler import Scheduler
from penstock.engine.speculative.draft import FOLLOWED, DraftProposer
from penstock.engine.speculative.ngram import NgramProposer
from penstock.engine.speculative.speculation import Proposer, Speculation
from penstock.engine.startup.memory import state_rows
from penstock.engine.startup.part import Part, Phases, load_part
from penstock.errors import ConfigError


def load_draft(config: EngineConfig, phases: Phases) -> Part | None:
    """The draft model with a cache of one block, or None; before the target, so that its memory is taken into account.

    Its real cache has the target's number of blocks; see `make_speculation`.
    """
    if config.speculation != "draft":
        if config.draft_model is not None:
            raise ConfigError("draft_model is only used with speculation: draft")
        return None
    if config.draft_model is None:
        raise ConfigError("speculation: draft needs a draft_model")
    if config.ranks > 1:
        raise ConfigError("speculation: draft works on one device; use ngram with several")
    with phases("draft model"):
        # It takes steps of as many tokens as the target verifies, so it is prepared like one that speculates.
        alone = replace(
            config,
            model=config.draft_model,
            speculation="ngram",
            draft_model=None,
            num_blocks=1,
            adapters=(),
            adapter_slots=0,
        )
        return load_part(alone, None, Phases(None))


def make_speculation(
    config: EngineConfig, target: Part, draft: Part | None, scheduler: Scheduler, *, overlap: bool
) -> Speculation | None:
    """What `Engine` takes, or None."""
    if config.speculation == "off":
        return None
    proposer: Proposer = NgramProposer(config.speculation_depth)
    if draft is not None:
        proposer = _draft_proposer(config, target, draft, scheduler)
    return Speculation(
        proposer,
        depth=config.speculation_depth,
        most_tokens=config.max_verified(target.max_running),
        overlap=overlap,
        clock=time.monotonic,
    )


def _draft_proposer(config: EngineConfig, target: Part, draft: Part, scheduler: Scheduler) -> DraftProposer:
    _check_vocabulary(config, target, draft)
    runner = Runner(
        draft.backend,
        draft.decoder,
        KVCache(draft.kv.shape, target.kv.num_blocks, target.kv.device, state_rows(target.max_running)),
        max_rows=target.max_running,
        max_model_len=target.max_model_len,
        block_size=config.block_size,
        max_verified=config.max_verified(target.max_running),
        followed=FOLLOWED,
        deterministic=config.deterministic,
    )
    runner.executor.prepare(target.token_budget)
    window = min(target.max_model_len, config.max_model_len or draft.model.max_positions, draft.model.max_positions)
    return DraftProposer(runner, scheduler, window=window, budget=target.token_budget)


def _check_vocabulary(config: EngineConfig, target: Part, draft: Part) -> None:
    ours, theirs = target.model.vocab_size, draft.model.vocab_size
    if ours != theirs:
        raise ConfigError(
            f"draft_model has a vocabulary of {theirs} tokens, the model one of {ours}; "
            "a draft model must have the same vocabulary"
        )
    assert config.draft_model is not None
    words = _vocabulary(Path(config.model)), _vocabulary(Path(config.draft_model))
    if None not in words and words[0] != words[1]:
        raise ConfigError("draft_model gives its token ids other meanings than the model; use one of the same family")


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Tokens by text, where the folder has a tokenizer that says so."""
    try:
        raw = json.loads((folder / "tokenizer.json").read_text())
        found = raw["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a GGUF file or bare weights: sizes must do
    return found if isinstance(found, dict) else None
