"""Captured steps on the ranks that follow rank 0: it packs their inputs and says which step to replay, and samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from penstock.engine.adapters.apply import LoraKernel
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.decoder import Decoder
from penstock.engine.runner.executor import Releasable


@dataclass(frozen=True, slots=True)
class BlockTables:
    """What a follower has of the rows of running sequences; see `Rows`."""

    block_tables: Tensor
    max_context: int

    def known_tokens(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Rank 0's tokens are written over these."""
        return ids.clamp(min=0)


@dataclass(frozen=True, slots=True)
class FollowerResources:
    """What a follower is made of; the decoders are this rank's parts, with the collectives."""

    decoder: Decoder
    kv: KVCache
    block_tables: Tensor
    max_context: int
    max_rows: int
    lora: LoraKernel | None = None
    adapted: Decoder | None = None
    narrow: Decoder | None = None
    further: Decoder | None = None
    altered: Decoder | None = None


class Follower(Releasable, ABC):
    """Captures and replays the steps of one model when rank 0 says so; see `Followers`."""

    @abstractmethod
    def capture(self, kind: int, shape: tuple[int, int]) -> None:
        """Capture a step, together with rank 0."""

    @abstractmethod
    def replay(self, kind: int, shape: tuple[int, int], inputs: npt.NDArray[np.uint8]) -> None:
        """Run a captured step."""
