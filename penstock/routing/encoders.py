"""The encoder models by name and alias. They are kept apart from generating models: startup does not wait for them and
health does not depend on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator

from penstock.backends.embedder import Embedder
from penstock.config.encoders import EncoderConfig
from penstock.protocol.errors import ModelNotFound


class Encoders:
    """Every encoder this gateway can reach."""

    def __init__(self, embedders: Iterable[Embedder], configured: Iterable[EncoderConfig]) -> None:
        self.created = int(time.time())
        self._embedders = {embedder.name: embedder for embedder in embedders}
        self.configs = {config.name: config for config in configured if config.name in self._embedders}
        self._names = {name: name for name in self._embedders}
        self._names |= {alias: config.name for config in self.configs.values() for alias in config.aliases}

    def __iter__(self) -> Iterator[Embedder]:
        return iter(self._embedders.values())

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def find(self, name: str) -> Embedder:
        """The encoder with this name or alias."""
        known = self._names.get(name)
        if known is None:
            raise ModelNotFound(name[:256], list(self._names))
        return self._embedders[known]

    @property
    def default(self) -> Embedder | None:
        """The first configured encoder, which the gateway's own features use."""
        return next(iter(self), None)

    async def close(self) -> None:
        await asyncio.gather(*(embedder.close() for embedder in self))
