"""The models of a running server: those of its configuration, and those that were loaded since.

Each that came later has a configuration of its own for its engines: what the server was started with stays as it is, so
that a process which is started again finds what it knew.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config import Config, ModelConfig
from penstock.config.load import check_model, conflicts
from penstock.errors import PenstockError
from penstock.sources.resolve import resolve
from penstock.supervisor.launch import replica
from penstock.supervisor.runtime import RuntimeFolder
from penstock.supervisor.unit import Unit

OnProgress = Callable[[str, str, float], None]
"""Told of a model, a phase of its loading, and how much of that is done."""


@dataclass(frozen=True, slots=True)
class _Later:
    place: int
    config: Config
    """Of its engines: the server's, with this model alone."""

    @property
    def model(self) -> ModelConfig:
        return self.config.models[0]


class ModelCatalogue:
    """Knows how to start an engine of every model."""

    def __init__(self, config: Config, folder: RuntimeFolder, on_progress: OnProgress | None = None) -> None:
        """`config` is resolved."""
        self._config = config
        self._folder = folder
        self._later: dict[str, _Later] = {}
        self._places = itertools.count(len(config.models) + len(config.encoders))
        self.on_progress: OnProgress = on_progress or (lambda model, phase, fraction: None)

    @property
    def loaded(self) -> dict[str, dict[str, Any]]:
        """The configurations of models that came later, as JSON has them."""
        return {name: dataclasses.asdict(later.model) for name, later in self._later.items()}

    def unit(self, name: str, index: int) -> Unit:
        """The engine process of a model's replica with this number."""
        later = self._later.get(name)
        if later is None:
            return replica(self._config, self._folder, name, index)
        unit = replica(later.config, self._folder, name, index, later.place)
        unit.on_progress = lambda phase, fraction: self.on_progress(name, phase, fraction)
        return unit

    async def add(self, described: Mapping[str, Any]) -> ModelConfig:
        """Check a model, described as in the configuration, and fetch it if it is not here."""
        model = check_model(described)
        if model.time_slice:
            raise PenstockError("models that take turns (time_slice) are there from the start; use memory_share")
        others = [*self._config.models, *(later.model for later in self._later.values())]
        problems = conflicts(dataclasses.replace(self._config, models=(*others, model)))
        if problems:
            raise PenstockError("; ".join(problems).replace(f"models[{len(others)}]: ", ""))
        model = dataclasses.replace(model, source=await self._fetch(model.name, model.source))
        if model.draft_model is not None:
            model = dataclasses.replace(model, draft_model=await self._fetch(model.name, model.draft_model))
        self._later[model.name] = _Later(next(self._places), dataclasses.replace(self._config, models=(model,)))
        return model

    def remove(self, name: str) -> None:
        self._later.pop(name, None)
        models = tuple(model for model in self._config.models if model.name != name)
        self._config = dataclasses.replace(self._config, models=models)

    async def _fetch(self, name: str, source: str) -> str:
        self.on_progress(name, "fetching", 0.0)
        return str(await asyncio.to_thread(resolve, source))
