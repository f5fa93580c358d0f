"""The encoder models by name and alias. They are kept apart from generating models: startup does not wait for them and
health does not depend on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator

from penstock.backends.embedder import Embedder
from penstock.config.encoders import EncoderConfig
from penstock.identity.access import Access
from penstock.protocol.errors import ModelNotFound
from penstock.routing.remote_embedder import RemoteEmbedder
from penstock.routing.remotes import RemoteModel


class Encoders:
    """Every encoder this gateway can reach."""

    def __init__(
        self,
        embedders: Iterable[Embedder],
        configured: Iterable[EncoderConfig],
        remotes: Iterable[RemoteModel] = (),
    ) -> None:
        """`remotes`: models of other servers; those that are declared as embedding or rerank models are encoders."""
        self._remotes: dict[str, RemoteEmbedder] = {}
        for model in remotes:
            if model.kind != "chat":
                embedder = RemoteEmbedder(model)
                self._remotes |= dict.fromkeys((model.name, *model.aliases), embedder)
        self.created = int(time.time())
        self._embedders = {embedder.name: embedder for embedder in embedders}
        self.configs = {config.name: config for config in configured if config.name in self._embedders}
        self._names = {name: name for name in self._embedders}
        self._names |= {alias: config.name for config in self.configs.values() for alias in config.aliases}

    def add(self, embedder: Embedder, config: EncoderConfig) -> None:
        """An encoder of the fleet."""
        self._embedders[embedder.name] = embedder
        self.configs[embedder.name] = config
        self._names |= dict.fromkeys((*config.aliases, embedder.name), embedder.name)

    def __iter__(self) -> Iterator[Embedder]:
        return iter(list(self._embedders.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def find(self, name: str, access: Access | None = None) -> Embedder:
        """The encoder with this name or alias, if it exists for a caller; without `access`: for the gateway itself."""
        if not self.allows(access, name):
            raise self.unknown(name, access)
        return self._embedders[self._names[name]]

    def unknown(self, name: str, access: Access | None) -> ModelNotFound:
        """The error for a name that is no encoder for a caller; it may be a model that generates text."""
        known = [known for known in self._names if self.allows(access, known)]
        known += [known for known in self._remotes if self.remote(known, access) is not None]
        return ModelNotFound(name[:256], known, purpose="for embeddings, scores or ranking")

    def remote(self, name: str, access: Access | None = None) -> RemoteEmbedder | None:
        """The encoder with this name or alias that another server runs, if it exists for a caller."""
        found = self._remotes.get(name)
        return found if found is not None and (access is None or found.model.allowed(access)) else None

    def any(self, name: str) -> Embedder | RemoteEmbedder:
        """The encoder with this name, wherever it runs, for the gateway itself."""
        return self._remotes.get(name) or self.find(name)

    def allows(self, access: Access | None, name: str) -> bool:
        """Whether the encoder called `name` exists for a caller."""
        if access is None:
            return name in self._names
        name = self._names.get(name, "")
        config = self.configs.get(name)
        return bool(name) and access.allows("model", name, aliases=() if config is None else config.aliases)

    def allowed(self, access: Access) -> list[Embedder]:
        """The encoders that exist for a caller."""
        return [embedder for embedder in self if self.allows(access, embedder.name)]

    def first(self, access: Access) -> Embedder | None:
        """The first configured encoder that exists for a caller."""
        return next(iter(self.allowed(access)), None)

    @property
    def default(self) -> Embedder | None:
        """The first configured encoder, which the gateway's own features use."""
        return next(iter(self), None)

    async def close(self) -> None:
        await asyncio.gather(*(embedder.close() for embedder in self))
