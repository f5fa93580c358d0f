"""What a choice between replicas is made from, and the interface of those who make it.

A policy sees snapshots, never backends, so that the same object serves a gateway, a test and a simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.engine.kv.block_hash import block_names
from penstock.engine.request import Request

MAX_BLOCKS = 512
"""Blocks of a prompt that are named for the choice of a replica; prompts that agree on these go together anyway."""


@dataclass(frozen=True, slots=True)
class ReplicaRequest:
    """A request, as far as it matters where it runs."""

    prompt_tokens: int
    expected_output: int = 0
    """Tokens that it will probably generate."""
    blocks: Sequence[bytes] = ()
    """Names of the full blocks of its prompt, from the first, as the engine's prefix cache names them. Empty when the
    policy does not ask for them."""
    block_size: int = 16
    session: str = ""
    """Requests with the same word here belong together (`x-session-id`, `prompt_cache_key`)."""
    tenant: str = ""

    @classmethod
    def of(
        cls,
        request: Request,
        block_size: int,
        *,
        expected_output: int,
        wants_blocks: bool,
        session: str = "",
        tenant: str = "",
    ) -> ReplicaRequest:
        """From an engine request. Adapters are told apart by name: their weights have names only in the engine."""
        named: list[bytes] = []
        if wants_blocks:
            limit = min(len(request.prompt), MAX_BLOCKS * block_size)
            named = block_names(request.prompt[:limit], block_size, request.cache_salt, request.adapter)
        return cls(len(request.prompt), expected_output, named, block_size, session, tenant)


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica at one moment: its newest load snapshot, corrected by what was sent since (see `ReplicaMeter`)."""

    name: str
    running: int = 0
    waiting: int = 0
    """Requests that wait in it, those it has not reported yet included."""
    slots: int = 0
    """Sequences that it runs at one time; 0: not known."""
    queued_tokens: int = 0
    """Prompt tokens sent to it that it has probably still to compute."""
    decoding_tokens: int = 0
    """Tokens it will probably still generate for what it has."""
    kv_use: float = 0.0
    """Used part of its KV cache, 0 to 1."""
    total_blocks: int = 0
    """Blocks of its KV cache; 0: not known."""
    prefill_tokens_per_s: float | None = None
    """Measured; None: not known yet."""
    decode_tokens_per_s: float | None = None
    weight: float = 1.0
    """What its circuit breaker leaves of it: 0 takes nothing, 1 everything."""


class ReplicaPolicy(Protocol):
    """Chooses where a request runs."""

    @property
    def wants_blocks(self) -> bool:
        """Whether `ReplicaRequest.blocks` matters to it; naming blocks costs time."""

    def choose(self, request: ReplicaRequest, candidates: Sequence[ReplicaView]) -> int:
        """The index of the replica to send `request` to; the policy takes note that it goes there. There is at least
        one candidate; those with weight 0 are chosen only when all have it."""

    def forget(self, replica: str) -> None:
        """The replica has lost its cache, or is gone."""
