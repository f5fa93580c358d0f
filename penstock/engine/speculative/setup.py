"""Speculation as the configuration asks for it.

With several ranks the draft model is cut like the target, over the shards of the first stage only: it is small, its
steps follow each other, and each would wait for a ring of stages. Where it cannot be cut that often, fewer shards have
it; a draft that one of them has alone is an ordinary decoder on rank 0.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.engine.backends.backend import Backend
from penstock.engine.backends.select import pick_device
from penstock.engine.config import EngineConfig, SpeculationForm
from penstock.engine.kv.cache import KVCache
from penstock.engine.loading.checkpoint import read_json
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.families import read_config
from penstock.engine.runner.runner import Runner
from penstock.engine.scheduler import Scheduler
from penstock.engine.speculative.draft import FOLLOWED, DraftProposer
from penstock.engine.speculative.eagle3 import is_head
from penstock.engine.speculative.head_setup import HEADS, HeadDraft, head_proposer, load_head
from penstock.engine.speculative.mtp import has_mtp
from penstock.engine.speculative.ngram import NgramProposer
from penstock.engine.speculative.speculation import Proposer, Speculation
from penstock.engine.startup.part import Part, Phases, load_part, open_weights
from penstock.errors import CheckpointError, ConfigError
from penstock.machine import usable_cores

if TYPE_CHECKING:
    from penstock.engine.parallel.launch import Ranks
    from penstock.engine.parallel.member import DraftMember, Member

log = logging.getLogger(__name__)

_OF_BLOCKS = ("muse_glimmer_assistant",)


@dataclass(frozen=True, slots=True)
class Draft:
    """What one process holds of a draft model."""

    part: Part
    """With a cache of one block, until the target's number of blocks is known."""
    member: DraftMember | None
    """The ranks that have the other parts; None: this is all of it."""
    row_states: int = 0
    """With recurrent layers: the slots of states of each row, one behind every token that is fed back."""
    caches: int = 1
    """Of the target, where shards have sequences of their own: their blocks are numbered through."""

    tap = None
    """It reads tokens, nothing of the target."""

    @property
    def backend(self) -> Backend:
        return self.part.backend

    @property
    def block_bytes(self) -> int:
        """What it needs beside every block of the target in this process."""
        return self.part.kv.shape.block_bytes * self.caches

    def sized_like(self, target: Part) -> Part:
        """The draft model with a cache for the sequences of the target."""
        states = _slots(target.max_running, self.row_states)
        kv = KVCache(self.part.kv.shape, target.kv.num_blocks * self.caches, target.kv.device, states)
        return replace(self.part, kv=kv, max_running=target.max_running, max_model_len=target.max_model_len)


def spread_draft(config: EngineConfig, checkpoint: object | None = None) -> EngineConfig:
    """The configuration, checked before there are ranks: with the form of speculation in place of `auto`, and with the
    number of shards that have a part of a draft model."""
    if config.draft_model is not None:
        _refuse_blocks(Path(config.draft_model))
    if config.speculation == "auto":
        config = replace(config, speculation=_form(config, checkpoint))
        log.info("speculation: auto means %s here", config.speculation)
    most, asked = config.tensor_parallel, config.draft_tensor_parallel
    if config.draft_model is not None and config.speculation not in ("draft", "eagle3"):
        raise ConfigError("draft_model is only used with speculation: draft or eagle3")
    if config.speculation != "draft":
        if asked is not None:
            raise ConfigError("draft_tensor_parallel is only used with speculation: draft")
        return config
    if asked is not None and asked > most:
        raise ConfigError(f"draft_tensor_parallel: {asked} is more than tensor_parallel: {most}")
    if config.ranks == 1:
        return config
    from penstock.engine.parallel.layout import splits

    model = read_config(open_weights(_alone(config), None).config)
    possible = [size for size in range(1, most + 1) if splits(model, size)]
    if asked is not None and asked not in possible:
        sizes = ", ".join(map(str, possible))
        raise ConfigError(f"draft_tensor_parallel: {asked} does not split the draft model evenly; {sizes} would do")
    # Of one that runs through transformers only the load shows whether it can be cut.
    shards = asked or (1 if model.by_transformers else possible[-1])
    log.info("the draft model runs on %d of %d shards of the first stage", shards, most)
    return replace(config, draft_tensor_parallel=shards)


def _refuse_blocks(folder: Path) -> None:
    """A drafter of the library that reads the model's hidden states, but in a way that no form of speculation does."""
    try:
        kind = read_json(folder / "config.json").get("model_type")
    except CheckpointError:
        return  # a GGUF file, or what is refused when it is read
    if kind in _OF_BLOCKS:
        raise ConfigError(
            f"draft_model: {kind} fills a block of draft tokens in one pass, in which they see each other in both "
            "directions; drafters here give one token after another. Use speculation: ngram, or a draft model"
        )


def _form(config: EngineConfig, checkpoint: object | None) -> SpeculationForm:
    """What `auto` means: the drafter that is named, or that the checkpoint has; n-grams without any."""
    if config.draft_model is not None:
        return "eagle3" if is_head(Path(config.draft_model)) else "draft"
    weights = open_weights(config, checkpoint)
    return "mtp" if has_mtp(weights, read_config(weights.config)) else "ngram"


def load_draft(
    config: EngineConfig, checkpoint: object | None, phases: Phases, member: Member | None = None
) -> Draft | HeadDraft | None:
    """This process's part of the drafter, if it has one; before the target, so that its memory is taken into
    account."""
    if config.speculation in HEADS:
        return load_head(config, checkpoint, phases, member)
    if config.speculation != "draft":
        return None
    shards = config.draft_tensor_parallel or 1
    if member is not None and member.place.rank >= shards:
        return None
    alone, among = _alone(config), None
    if shards > 1:
        from penstock.engine.parallel.member import DraftMember

        assert member is not None
        among = DraftMember(member, shards)
    elif member is not None:
        threads = config.threads or max(1, usable_cores() // member.neighbours)
        alone = replace(alone, device=str(member.device(pick_device(config.device))), threads=threads)
    with phases("draft model"):
        try:
            part = load_part(alone, None, Phases(None), among, own_cache=False)
        except ConfigError as error:
            remedy = "; draft_tensor_parallel: 1 leaves it whole" if shards > 1 else ""
            raise ConfigError(f"draft_model: {error}{remedy}") from error
    row_states = 0
    if part.model.recurrent or not part.kv.shape.blocks_suffice:
        # Taken before the target's cache is sized from what is left.
        row_states = max(config.speculation_depth, 1)
        part = replace(part, kv=KVCache(part.kv.shape, 1, part.kv.device, _slots(part.max_running, row_states)))
    return Draft(part, among, row_states, config.tensor_parallel if config.attention_parallel == "data" else 1)


def _slots(rows: int, row_states: int) -> int:
    """Slots of states of a draft model's cache; slot 0 is nobody's."""
    return 1 + max(rows * row_states, 1)


def _alone(config: EngineConfig) -> EngineConfig:
    """The configuration of the draft model."""
    if config.draft_model is None:
        raise ConfigError("speculation: draft needs a draft_model")
    # It takes steps of as many tokens as the target verifies, so it is prepared like one that speculates.
    return replace(
        config,
        model=config.draft_model,
        speculation="ngram",
        draft_model=None,
        draft_tensor_parallel=None,
        tensor_parallel=config.draft_tensor_parallel or 1,
        pipeline_parallel=1,
        devices=(),
        machines=(),
        expert_parallel=False,
        expert_copies=0,
        attention_parallel="tensor",
        adapters=(),
        adapter_slots=0,
    )


def make_speculation(
    config: EngineConfig,
    target: Part,
    draft: Draft | HeadDraft | None,
    scheduler: Scheduler,
    ranks: Ranks | None,
    *,
    overlap: bool,
) -> Speculation | None:
    """What `Engine` takes, or None."""
    if config.speculation == "off":
        return None
    proposer: Proposer = NgramProposer(config.speculation_depth)
    if isinstance(draft, HeadDraft):
        proposer = head_proposer(config, target, draft, scheduler)
    elif draft is not None:
        proposer = _draft_proposer(config, target, draft, scheduler, ranks)
    return Speculation(
        proposer,
        depth=config.speculation_depth,
        most_tokens=config.max_verified(target.max_running),
        overlap=overlap,
        clock=time.monotonic,
    )


def _draft_proposer(
    config: EngineConfig, target: Part, draft: Draft, scheduler: Scheduler, ranks: Ranks | None
) -> DraftProposer:
    _check_vocabulary(config, target, draft.part)
    part = draft.sized_like(target)
    decoder = part.decoder
    if draft.member is not None:
        assert ranks is not None
        decoder = _lead(part, draft.member, ranks)
    runner = Runner(
        part.backend,
        decoder,
        part.kv,
        max_rows=part.max_running,
        max_model_len=part.max_model_len,
        block_size=config.block_size,
        max_verified=config.max_verified(part.max_running),
        followed=FOLLOWED,
        deterministic=config.deterministic,
        several_ranks=draft.member is not None,
        scores_prompts=False,
    )
    runner.executor.prepare(target.token_budget)
    positions = part.model.max_positions
    window = min(part.max_model_len, config.max_model_len or positions, positions)
    return DraftProposer(runner, scheduler, window=window, budget=target.token_budget, row_states=draft.row_states)


def _lead(part: Part, member: DraftMember, ranks: Ranks) -> Decoder:
    from penstock.engine.parallel.channel import DRAFT
    from penstock.engine.parallel.decoder import lead

    blocks = -(-part.max_model_len // part.kv.block_size)
    return lead(part.decoder, ranks, part.max_running + 1, blocks, model=DRAFT, groups=member.groups)


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
