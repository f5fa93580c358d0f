"""What a step computes: where its tokens stand, on the host and on the device, and how ranks share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(slots=True)
class HostBatch:
    """A step's inputs before they went to the device: int64 arrays, for a recorded step, and for ranks that run the
    same step elsewhere."""

    token_ids: Ints
    positions: Ints
    slots: Ints
    query_starts: Ints
    context_lens: Ints
    rows: Ints
    tables: npt.NDArray[np.int32]
    """All block tables."""
    block_size: int
    states: Ints | None = None
    """[4, T]: the fields of `StateBatch`; None where no layer keeps states."""


def attended(query_starts: Ints, context_lens: Ints, decodes: int) -> int:
    """Keys that the new tokens of a step's prompts see, summed over tokens; see `AttentionBatch`."""
    if decodes >= len(context_lens):  # most steps
        return 0
    new, seen = np.diff(query_starts)[decodes:], context_lens[decodes:]
    return int((new * (seen - new) + new * (new + 1) // 2).sum())


class StepShare(Protocol):
    """A shard's part of a step; see `parallel.data`."""

    @property
    def slots(self) -> Ints:
        """Of all tokens of the step, in the blocks of all shards."""
        ...

    def take(self, token_ids: Tensor) -> Tensor:
        """Its tokens, of all of the step."""
        ...

    def collect(self, hidden: Tensor, shards: Any) -> Tensor:
        """On the first shard: the hidden states of all tokens of the step, in its order. All shards call it."""
        ...


class Followers(Protocol):
    """The other ranks of an engine: they capture the steps that rank 0 captures and replay them when it does.

    `kind` and `shape` say which step it is; all ranks understand them alike (see the backend that captures).
    """

    def capture(self, kind: int, shape: Sequence[int]) -> None:
        """Have them capture a step now. This rank does the same next: its collectives wait for theirs."""
        ...

    def replay(self, kind: int, shape: Sequence[int], inputs: npt.NDArray[np.uint8], host: HostBatch) -> None:
        """Have them run a captured step. `inputs`: its packed inputs; of `host` the block tables, contexts and rows."""
        ...


@dataclass(slots=True)
class StateBatch:
    """Which states the recurrent layers of a step read and write: int32 [T] each.

    A run is what a step computes of one sequence: a decoded token, with draft tokens behind it, or a chunk of a prompt.
    States lie in slots. Slot 0 stands for none: a run that reads it starts empty, a token that writes it keeps nothing.
    A slot that one run writes is read by no other run of the step.
    """

    first: Tensor
    """Packed index of the first token of each token's run. Padding belongs to the first run and writes nothing."""
    last: Tensor
    """Packed index of the last one."""
    reads: Tensor
    """The slot that holds the state before each token's run."""
    writes: Tensor
    """The slot that keeps the state behind each token."""

    @classmethod
    def of_one(cls, tokens: int, device: torch.device) -> StateBatch:
        """One run from an empty state; its last state goes to slot 1."""
        nowhere = torch.zeros(tokens, dtype=torch.int32, device=device)
        last, writes = torch.full_like(nowhere, tokens - 1), nowhere.clone()
        writes[-1] = 1
        return cls(nowhere, last, nowhere, writes)


@dataclass(slots=True)
class AttentionBatch:
    """Where each packed token stands and which cache blocks its sequence owns. Tensors are on the device."""

    positions: Tensor
    """int64 [T]: position of each token in its sequence."""
    slots: Tensor
    """int64 [T]: cache slot that receives each token's key and value."""
    query_starts: Tensor
    """int32 [S + 1]: packed index of each sequence's first new token."""
    context_lens: Tensor
    """int32 [S]: keys visible to each sequence's last new token, itself included."""
    rows: Tensor
    """int32 [S]: each sequence's row in `block_tables`."""
    block_tables: Tensor
    """int32 [max_rows, max_blocks]: the cache blocks of every row."""
    num_decodes: int
    """The first `num_decodes` sequences have exactly one new token."""
    max_query: int
    """Upper bound of new tokens in one sequence (host value, so that kernels can be launched without a sync)."""
    max_context: int
    """Upper bound of `context_lens` (host value)."""
    total_context: int | None = None
    """Upper bound of the sum of `context_lens` behind the first `num_decodes`; None where the host has none that is
    worth anything, as when a step is captured."""
    attended: int | None = None
    """Keys that the new tokens of those sequences see, summed over tokens; None where the host does not know."""
    longest: int | None = None
    """The largest of `context_lens`, or more where that makes no difference to a captured step. None: it can only be
    read from the device."""
    chosen: Any = None
    """What the last layer with an indexer chose (`indexer.Chosen`), where layers behind it attend to the same."""
    waves: Any = None
    """How the step is cut for layers that go from state to state segment by segment, once one of them has cut it."""
    host: HostBatch | None = None
    """Only in an engine of several ranks."""
    states: StateBatch | None = None
    """Only for models with recurrent layers."""
    share: StepShare | None = None
    """Where these are the tokens of one shard only, and others have other tokens of the step."""

    @property
    def owners(self) -> Tensor:
        """int64 [T]: index of the sequence of every packed token."""
        index = torch.arange(len(self.positions), dtype=torch.int32, device=self.query_starts.device)
        found = torch.searchsorted(self.query_starts[1:], index, right=True)
        return found.clamp(max=len(self.rows) - 1)

    @classmethod
    def of_one(cls, tokens: int, block_size: int, device: torch.device) -> AttentionBatch:
        """One sequence from its start, in the blocks from 1 on."""
        positions = torch.arange(tokens, device=device)
        return cls(
            positions=positions,
            slots=positions + block_size,
            query_starts=torch.tensor([0, tokens], dtype=torch.int32, device=device),
            context_lens=torch.tensor([tokens], dtype=torch.int32, device=device),
            rows=torch.zeros(1, dtype=torch.int32, device=device),
            block_tables=torch.arange(1, -(-tokens // block_size) + 1, dtype=torch.int32, device=device).unsqueeze(0),
            num_decodes=0,
            max_query=tokens,
            max_context=tokens,
            total_context=tokens,
            longest=tokens,
            attended=tokens * (tokens + 1) // 2,
            states=StateBatch.of_one(tokens, device),
        )
