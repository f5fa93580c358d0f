"""The models of a running server: those of its configuration, and those loaded at run time.

Each model loaded at run time has a configuration file of its own. The file that the server was started with never
changes, so a restarted process finds the same settings as before.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.config import Config, ModelConfig
from penstock.config.load import check_model, conflicts
from penstock.config.variants import Variant, revision, variants, whole_revision
from penstock.errors import PenstockError
from penstock.sources.resolve import resolve
from penstock.supervisor.autoscaler import Target, targets
from penstock.supervisor.launch import Site, replica
from penstock.supervisor.runtime import RuntimeFolder
from penstock.supervisor.unit import Unit

T = TypeVar("T")
OnProgress = Callable[[str, str, float], None]
"""Called with a model, a phase of its loading, and the fraction of the phase that is done."""


@dataclass(frozen=True, slots=True)
class _AddedModel:
    place: int
    config: Config
    """The configuration of its engines: the server's, with this model only."""

    @property
    def model(self) -> ModelConfig:
        return self.config.models[0]


class ModelCatalogue:
    """Builds the engine processes of every model."""

    def __init__(
        self,
        config: Config,
        folder: RuntimeFolder,
        on_progress: OnProgress | None = None,
        site: Site | None = None,
        originals: Iterable[ModelConfig] = (),
    ) -> None:
        """`config` must be resolved. `site`: for engines that other machines use, too. `originals`: its models as they
        are described to others, so that a change of the description can be told from none."""
        self._site = site
        self._originals = {model.name: model for model in originals}
        self._config = config
        self._folder = folder
        self._added: dict[str, _AddedModel] = {}
        self._places = itertools.count(len(config.models) + len(config.encoders))
        self.on_progress: OnProgress = on_progress or (lambda model, phase, fraction: None)

    @property
    def loaded(self) -> dict[str, dict[str, Any]]:
        """The configurations of models loaded at run time, as plain JSON values."""
        return {name: dataclasses.asdict(added.model) for name, added in self._added.items()}

    @property
    def autoscaled(self) -> dict[str, Target]:
        """What is scaled automatically."""
        return targets(self._models)

    @property
    def names(self) -> set[str]:
        return {model.name for model in self._config.models} | self._added.keys()

    @property
    def place(self) -> tuple[str, str]:
        """Region and zone of this machine."""
        return self._config.fleet.region, self._config.fleet.zone

    @property
    def _models(self) -> list[ModelConfig]:
        configured = [model for model in self._config.models if model.name not in self._added]
        return [*configured, *(added.model for added in self._added.values())]

    def model(self, name: str) -> ModelConfig:
        return next(model for model in self._models if model.name == name)

    def pools(self, name: str) -> list[str]:
        """The pools of a model; none for one without."""
        return [pool.name for model in self._models if model.name == name for pool in model.pools]

    def missing(self, name: str, pool: str, present: Iterable[Variant], more: int) -> list[Variant]:
        """The variants of the next replicas of a pool which has these."""
        there = Counter(present)
        wanted = variants(self.model(name), pool, there.total() + more)
        return sorted((wanted - there).elements())[:more]

    def unit(self, name: str, index: int, variant: Variant | None = None) -> Unit:
        """The engine process of a model's replica number `index`. `variant`: if not the one that this number has."""
        added = self._added.get(name)
        if added is None:
            unit = replica(self._config, self._folder, name, index, site=self._site, variant=variant)
        else:
            unit = replica(added.config, self._folder, name, index, added.place, self._site, variant)
            unit.on_progress = lambda phase, fraction: self.on_progress(name, phase, fraction)
        unit.revision = self.revision(name, unit.pool)
        return unit

    def revision(self, name: str, pool: str = "") -> str:
        """Of the settings with which a replica would be started now."""
        return revision(self._originals.get(name) or self.model(name), pool)

    def whole_revision(self, name: str) -> str:
        """Of the settings of all pools of a model."""
        return whole_revision(self._originals.get(name) or self.model(name))

    async def add(self, description: Mapping[str, Any], check_room: Callable[[int], None]) -> ModelConfig:
        """Checks a model, described as in the configuration, and fetches its files if needed. `check_room` raises if
        there may not be that many more engines."""
        model = check_model(description, fleet=bool(self._config.fleet.url))
        check_room(model.first_replicas)
        if model.time_slice and not self._config.fleet.url:
            raise PenstockError("a model with time_slice cannot be loaded at run time; use memory_share instead")
        original = model
        # A model that is there already gets other settings.
        others = [other for other in self._models if other.name != model.name]
        problems = conflicts(dataclasses.replace(self._config, models=(*others, model)))
        if problems:
            raise PenstockError("; ".join(problems).replace(f"models[{len(others)}]: ", ""))
        model = dataclasses.replace(model, source=await self._fetch(model.name, model.source))
        if model.draft_model is not None:
            model = dataclasses.replace(model, draft_model=await self._fetch(model.name, model.draft_model))
        self._added[model.name] = _AddedModel(next(self._places), dataclasses.replace(self._config, models=(model,)))
        self._originals[model.name] = original
        return model

    def remove(self, name: str) -> None:
        self._added.pop(name, None)
        self._originals.pop(name, None)
        models = tuple(model for model in self._config.models if model.name != name)
        self._config = dataclasses.replace(self._config, models=models)

    async def _fetch(self, name: str, source: str) -> str:
        self.on_progress(name, "fetching", 0.0)
        return str(await in_daemon_thread(lambda: resolve(source), f"fetch {name}"))


async def in_daemon_thread(function: Callable[[], T], name: str) -> T:
    """Calls a function that may take hours in a thread that does not delay the end of the process."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def tell(settle: Callable[[], None]) -> None:
        if not result.done():
            settle()

    def run() -> None:
        try:
            value = function()
        except BaseException as error:
            problem = error
            settle: Callable[[], None] = lambda: result.set_exception(problem)  # noqa: E731
        else:
            settle = lambda: result.set_result(value)  # noqa: E731
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, settle)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await result
