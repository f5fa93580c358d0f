"""The interface of replica policies and the values they decide on.

A policy sees snapshots, never backends, so the same object works in a gateway, a test and a simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.engine.kv.block_hash import block_names
from penstock.engine.request import Request

MAX_BLOCKS = 512
"""Leading blocks of a prompt that are hashed to choose a replica; prompts that share all of these belong together."""


@dataclass(frozen=True, slots=True)
class ReplicaRequest:
    """The facts about a request that decide which replica should run it."""

    prompt_tokens: int
    expected_output: int = 0
    """Tokens that it will probably generate."""
    blocks: Sequence[bytes] = ()
    """Hashes of the prompt's full blocks, from the first, as in the engine's prefix cache. Empty when the policy does
    not use them."""
    block_size: int = 16
    session: str = ""
    """Groups requests that belong together (`x-session-id`, `prompt_cache_key`)."""
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
        """From an engine request. Adapters are hashed by name: only the engine knows the hash of their weights."""
        named: list[bytes] = []
        if wants_blocks:
            limit = min(len(request.prompt), MAX_BLOCKS * block_size)
            named = block_names(request.prompt[:limit], block_size, request.cache_salt, request.adapter)
        return cls(len(request.prompt), expected_output, named, block_size, session, tenant)


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica at one moment: its newest load snapshot plus what was sent since (see `ReplicaMeter`)."""

    name: str
    running: int = 0
    waiting: int = 0
    """Requests waiting in the engine, including those sent but not yet reported."""
    slots: int = 0
    """Sequences that it runs at one time; 0: not known."""
    queued_tokens: int = 0
    """Prompt tokens sent to it that it has probably not computed yet."""
    decoding_tokens: int = 0
    """Tokens it will probably still generate for the requests it has."""
    kv_use: float = 0.0
    """Used part of its KV cache, 0 to 1."""
    total_blocks: int = 0
    """Blocks of its KV cache; 0: not known."""
    prefill_tokens_per_s: float | None = None
    """Measured; None: not known yet."""
    decode_tokens_per_s: float | None = None
    round_trip_s: float = 0.0
    """Measured time to it and back."""
    weight: float = 1.0
    """Trust of its circuit breaker: 0 takes no requests, 1 takes its full share."""


class ReplicaPolicy(Protocol):
    """Chooses the replica that runs a request."""

    @property
    def wants_blocks(self) -> bool:
        """Whether it uses `ReplicaRequest.blocks`; hashing blocks costs time."""

    def choose(self, request: ReplicaRequest, candidates: Sequence[ReplicaView]) -> int:
        """The index of the replica to send `request` to; the policy remembers its choice. There is at least one
        candidate; one with weight 0 is chosen only when all have weight 0."""

    def heard(self, request: ReplicaRequest, replica: ReplicaView) -> None:
        """Another gateway sent `request` to the replica; only its prefix and its session are known."""

    def forget(self, replica: str) -> None:
        """Called when a replica has lost its cache or is gone."""
