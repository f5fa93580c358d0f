"""Decoders with several residual streams, some of whose layers look up token ids."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.experts import StepTokens
from penstock.engine.models.token_digits import digits_of, ids_of


@dataclass(frozen=True, slots=True)
class StreamsDecoder(Decoder):
    """See `Decoder`. The residual stream of a token has all its streams, side by side. Stages of a pipeline pass on
    token ids where later layers look them up."""

    tokens: StepTokens = field(default_factory=StepTokens)
    """Those of the step."""

    @property
    def launched_eagerly(self) -> bool:
        return True  # how a step is cut depends on its sequences

    @property
    @abstractmethod
    def told(self) -> Iterable[StepTokens]:
        """What layers read."""

    @property
    def stream_width(self) -> int:
        stage = self.config.stage
        return self.residual_width + (0 if stage is None else stage.arrives.width)

    @property
    def residual_width(self) -> int:
        assert self.config.streams is not None
        return self.config.streams.count * self.config.hidden_size

    def entered(self, sent: Tensor) -> Tensor:
        stage = self.config.stage
        if stage is None or not stage.arrives.tokens:
            return sent
        self._tell(ids_of(sent[:, self.residual_width :]))
        return sent[:, : self.residual_width].contiguous()

    def passed_on(self, stream: Tensor) -> Tensor:
        stage = self.config.stage
        if stage is None or not stage.leaves.tokens:
            return stream
        return torch.cat((stream, digits_of(self.tokens.of(len(stream)), stream.dtype)), dim=1)

    def _tell(self, token_ids: Tensor) -> None:
        for tokens in (self.tokens, *self.told):
            tokens.ids = token_ids

    def embed(self, token_ids: Tensor) -> Tensor:
        self._tell(token_ids)  # those behind the vocabulary too, which adapters bring: n-grams are of any ids
        stream = Decoder.embed(self, token_ids)
        return stream.repeat(1, self.residual_width // stream.shape[1])
