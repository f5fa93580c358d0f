"""The state of one request inside the engine."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.engine.grammar.interface import TokenMatcher
from penstock.engine.grammar.thought import NEVER, ThoughtState
from penstock.engine.kv.block_hash import root_name
from penstock.engine.request import FinishReason, Request, TokenLogprob
from penstock.engine.watermark import WatermarkState

if TYPE_CHECKING:
    from penstock.engine.adapters.peft import LoadedAdapter


class Sequence:
    """Tokens of a request and how far they have been computed.

    With overlap the engine schedules a step before it has seen the previous step's tokens. Those are `pending`:
    they exist on the device and count towards `length`, but their values are not yet in `tokens`.
    """

    __slots__ = (
        "adapter",
        "arrived",
        "base",
        "block_names",
        "blocks",
        "branch",
        "cached_tokens",
        "computed",
        "deadline",
        "drafted",
        "epoch",
        "failed_restores",
        "finish_reason",
        "first_scheduled",
        "first_token",
        "hold",
        "id",
        "key",
        "limit",
        "matcher",
        "named",
        "params",
        "pending",
        "prompt_len",
        "prompt_logprobs",
        "recalled",
        "recalls",
        "released",
        "request",
        "root",
        "row",
        "row_version",
        "slot",
        "slow_masks",
        "source",
        "started",
        "state",
        "thought",
        "tokens",
        "virtual",
        "watermark",
        "window",
    )

    def __init__(self, request: Request, arrived: float, key: tuple[float, int], window: int = sys.maxsize) -> None:
        self.request = request
        self.id = request.request_id
        self.params = request.params
        self.tokens = request.prompt + request.produced
        self.prompt_len = len(request.prompt)
        self.virtual = 0
        """Tokens before the prompt that stand for what its adapter has learned; see `begin_with`."""
        self.window = window
        self.limit = min(self.prompt_len + request.params.max_tokens, window)
        """Tokens at which it ends: what was asked for, and what the context window holds."""
        self.arrived = arrived
        self.key = key
        """Scheduling order: smaller runs first and is preempted last."""
        self.deadline = None if request.timeout_s is None else arrived + request.timeout_s
        self.computed = 0
        """Tokens whose keys and values are in the cache once the scheduled steps have run."""
        self.pending = 0
        self.blocks: list[int] = []
        self.base = 0
        """Which cache they are in, where there are several; see `kv.partition`."""
        self.root = root_name(request.cache_salt)
        self.block_names: list[bytes] = []
        self.named = 0
        """How many leading blocks are already known to the prefix cache."""
        self.released = 0
        """How many leading blocks were released because a sliding window has passed them."""
        self.state = 0
        """With recurrent layers: the slot of its state while running; see `kv.states`."""
        self.source = 0
        """The slot that its first step reads instead, if it starts behind a known prefix."""
        self.drafted: tuple[int, ...] = ()
        """The slots behind its last token and the draft tokens that are being verified."""
        self.branch = 0
        """Tokens that it has in common with what came before, where no state was kept."""
        self.recalled = False
        """Whether blocks of its beginning have been read from disk for it since it last ran."""
        self.recalls = 0
        """How many blocks were asked for when it was last put aside for them."""
        self.failed_restores = 0
        """How often steps failed that were to copy its blocks back from the host."""
        self.row = -1
        """Row in the runner's device tensors while running."""
        self.adapter: LoadedAdapter | None = None
        """Weights of `request.adapter`, once they are in memory; kept to the end, also across a reload."""
        self.slot = -1
        """The adapter's slot on the device, while running."""
        self.epoch = 0
        """Grows with every (re)start, so that a resumed sequence can be told from one that never left."""
        self.row_version = 0
        """Grows with every (re)start too, and when other flags hold for its row."""
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.cached_tokens: int | None = None
        self.started = False
        """Whether a delta has been sent."""
        self.matcher: TokenMatcher | None = None
        """Its place in its grammar and token rules, if it has any; it has taken the tokens in `tokens`."""
        self.thought: ThoughtState | None = None
        """Its place in its thought, until that is over or needs no attention any more."""
        self.hold = NEVER
        """The length from which on the next step needs to know all of its tokens: its thought may have to be closed."""
        self.watermark: WatermarkState | None = None
        """Its noise, if it is watermarked; its next step needs to know all of its tokens then."""
        if self.params.watermark and not self.params.greedy:
            self.watermark = WatermarkState(self.params.watermark, self.params.seed, self.prompt_len)
        self.slow_masks = 0
        """Masks of its grammar that took too long."""
        self.finish_reason: FinishReason | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        if request.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    def begin_with(self, virtual: Iterable[int]) -> None:
        """Put the virtual tokens of its adapter before the prompt, once, before anything is computed. They take
        positions and blocks like others; what clients are told of leaves them out."""
        own = list(virtual)
        count = len(own)
        if not count:
            return
        self.virtual = count
        self.tokens = own + self.tokens
        self.prompt_len += count
        self.limit = min(self.prompt_len + self.params.max_tokens, self.window)
        if self.hold != NEVER:
            self.hold += count
        if self.watermark is not None:
            self.watermark = WatermarkState(self.params.watermark, self.params.seed, self.prompt_len)

    @property
    def length(self) -> int:
        """Tokens that exist, pending ones included."""
        return len(self.tokens) + self.pending

    @property
    def output_len(self) -> int:
        return self.length - self.prompt_len

    def barred_stops(self, ahead: int = 0) -> tuple[int, ...]:
        """Stop tokens that may not be sampled behind `ahead` draft tokens, because the minimum length is not reached.

        Call it when the token being sampled is already counted as pending.
        """
        if self.thought is not None and self.thought.awaited:
            return self.params.stop_token_ids  # the answer has a grammar: there must be one
        return self.params.stop_token_ids if self.output_len + ahead <= self.params.min_tokens else ()

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def __repr__(self) -> str:
        return f"<Sequence {self.id} {self.computed}/{self.length} blocks={len(self.blocks)}>"
