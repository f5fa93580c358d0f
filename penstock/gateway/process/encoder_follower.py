"""The encoders of this gateway follow the fleet: engines that register anywhere are used beside that of this machine.

Invariant: an encoder that was found once stays known; while none of its engines is up, its requests wait for one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from penstock.backends.embedder import Embedder
from penstock.backends.encoder import EncoderBackend
from penstock.backends.encoder_set import EncoderSet
from penstock.config.check import Checker
from penstock.config.encoders import EncoderConfig
from penstock.config.tree import parse_yaml
from penstock.errors import ConfigError, PenstockError
from penstock.identity.labels import Labels
from penstock.protocol.control import Replica, Topology
from penstock.protocol.transport import CurveClient
from penstock.routing.encoders import Encoders
from penstock.routing.registry import ModelRegistry
from penstock.text.fair_threads import FairThreads

log = logging.getLogger("penstock.gateway")


def encoder_backend(encoder: EncoderConfig, endpoint: str, curve: CurveClient | None = None) -> EncoderBackend:
    """The client of one engine."""
    return EncoderBackend(endpoint, curve=curve, silence_s=encoder.watchdog_s + 15.0, max_in_flight=encoder.max_waiting)


def served_encoder(encoder: EncoderConfig, engines: EncoderSet, ask: Callable[[str], None] | None = None) -> Embedder:
    return Embedder(
        encoder.name,
        encoder.source,
        engines,
        ask=ask,
        wait_s=encoder.wait_s,
        input_price=encoder.input_price,
        labels=Labels(encoder.labels),
    )


class EncoderFollower:
    """Makes the encoders of a gateway those of its fleet."""

    def __init__(
        self,
        encoders: Encoders,
        configured: Mapping[str, EncoderConfig],
        models: ModelRegistry,
        curve: Callable[[Replica], CurveClient | None],
        threads: FairThreads,
    ) -> None:
        """`configured`: encoders of this gateway's configuration, whose settings have precedence. `curve`: the keys for
        an engine. `threads`: where long texts are tokenized."""
        self._encoders = encoders
        self._configured = configured
        self._models = models
        self._curve = curve
        self._threads = threads
        self._refused: dict[str, str] = {}

    async def follow(self, topology: Topology) -> None:
        for name in topology.encoders:
            if name not in self._encoders:
                self._add(name, topology.loaded_encoders.get(name, {}))
        for embedder in self._encoders:
            if isinstance(embedder.backend, EncoderSet):
                config = self._encoders.configs[embedder.name]
                found = topology.encoders.get(embedder.name, ())
                await embedder.backend.follow(
                    {f"{one.name} {one.endpoint}": partial(self._backend, config, one) for one in found}
                )

    def _backend(self, config: EncoderConfig, replica: Replica) -> EncoderBackend:
        return encoder_backend(config, replica.endpoint, self._curve(replica))

    def _add(self, name: str, described: Mapping[str, Any]) -> None:
        try:
            if self._models.named(name):
                raise ConfigError(f"two models are called `{name}`; names and aliases must differ")
            config = self._configured.get(name) or read_encoder(described)
        except PenstockError as error:
            if self._refused.get(name) != str(error):
                self._refused[name] = str(error)
                log.error("an encoder of the fleet cannot be served", extra={"model": name, "why": str(error)})
            return
        embedder = served_encoder(config, EncoderSet())
        embedder.threads = self._threads
        self._encoders.add(embedder, config)


def read_encoder(described: Mapping[str, Any]) -> EncoderConfig:
    """An encoder that was checked where it was configured."""
    checker = Checker()
    config: EncoderConfig = checker.section(EncoderConfig, parse_yaml(json.dumps(dict(described)), "encoder"), "")
    if checker.problems or not config.name:
        raise ConfigError("\n".join(checker.problems) or "its engine does not say what it is")
    return config
