"""The served models by name, alias and adapter name. A model's backend is one engine or a `ReplicaSet`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import penstock
from penstock.backends.base import Backend
from penstock.config.autoscale import AutoscaleConfig
from penstock.config.sampling import UNSET_DEFAULTS, SamplingDefaults
from penstock.errors import CheckpointError, ConfigError
from penstock.identity.access import Access
from penstock.identity.labels import OF_OWN, Demand, Requirement
from penstock.protocol.errors import InvalidRequest, ModelNotFound
from penstock.routing.placement import ANYWHERE, Placement, PlacementFacts
from penstock.routing.remotes import RemoteModel
from penstock.routing.replicas import ReplicaSet
from penstock.text import TextModel
from penstock.text.adapter_text import AdapterTexts


class AnsweringModel(Protocol):
    """A model that answers requests: a served model or a remote one."""

    @property
    def name(self) -> str: ...

    @property
    def base_name(self) -> str:
        """Its name in metrics, prices and the ledger."""

    @property
    def adapter(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def context_window(self) -> int | None:
        """Tokens of prompt and answer together; None where that is not known."""

    @property
    def sampling(self) -> SamplingDefaults:
        """For requests that give no values; not set where another server decides."""

    def unmet(self, demand: Demand) -> list[Requirement]:
        """What of a demand it meets nowhere; empty: somewhere it meets all of it."""


@dataclass(slots=True)
class ServedModel:
    """A model that clients can name."""

    name: str
    text: TextModel
    backend: Backend
    aliases: tuple[str, ...] = ()
    input_price: float = 0.0
    """Dollars per million prompt tokens."""
    output_price: float = 0.0
    cost_per_hour: float = 0.0
    """Hardware cost of one engine, in dollars."""
    source: str = ""
    """Where its files are; empty: not known here."""
    autoscale: AutoscaleConfig | None = None
    """None: the number of replicas is changed by hand."""
    tool_format: str = "auto"
    """How it writes function calls; `auto`: as its chat template does."""
    reasoning: str = "auto"
    """How it marks its thoughts; `auto`: as its chat template does; `off`: they are not told from answers."""
    thinking_budget: int | None = None
    """Tokens of a thought, for requests that do not say; None: any number."""
    sampling: SamplingDefaults = UNSET_DEFAULTS
    """For requests that give no values of their own."""
    time_slice: str = ""
    """The time-slice group with which it shares memory; empty: none."""
    adapters: tuple[str, ...] = ()
    """Configured LoRA adapters, until the engine reports its own list."""
    adapter_owners: Mapping[str, str] = field(default_factory=dict)
    """The tenants that alone may use configured adapters."""
    adapter_sources: Mapping[str, str] = field(default_factory=dict)
    """Where configured adapters are."""
    adapter_texts: AdapterTexts | None = None
    """Tokenizers and templates that adapters bring; None: theirs are this model's."""
    fallback: tuple[str, ...] = ()
    """Models that answer when this one cannot, in order."""
    autoscaled: bool = False
    """The supervisor changes the number of replicas with the load."""
    autoscaled_pools: tuple[str, ...] = ()
    """The same of its pools."""
    overflow_at: int | None = None
    """Requests in flight per replica from which the fallbacks are tried first."""
    adapter: str = ""
    """The adapter, if this is a base model with one."""
    base: str = ""
    """The name of that base model."""
    base_aliases: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def base_name(self) -> str:
        """Its name in the engine's metrics: adapters count as their base model."""
        return self.base or self.name

    def place(self, facts: PlacementFacts) -> Placement:
        """Where a request may run."""
        backend = self.backend
        if not isinstance(backend, ReplicaSet) or (backend.placer.trivial and not facts.asked and not facts.demand):
            return ANYWHERE
        return backend.placer.place(facts, backend.windows)

    def unmet(self, demand: Demand) -> list[Requirement]:
        """What of a demand it meets nowhere; empty: somewhere it meets all of it."""
        if not demand:
            return []
        backend = self.backend
        return backend.unmet(demand) if isinstance(backend, ReplicaSet) else demand.unmet(OF_OWN)

    def overflows(self, waiting: int) -> bool:
        """Whether it has so many requests that fallbacks should be tried first. `waiting`: those still queued in the
        gateway."""
        if self.overflow_at is None:
            return False
        up = sum(replica.ready for replica in self.backend.replicas)
        return self.backend.in_flight + waiting >= self.overflow_at * max(up, 1)

    @property
    def adapter_names(self) -> list[str]:
        told = self.backend.adapters
        return list(self.adapters if told is None else told)

    def adapter_owner(self, name: str) -> str:
        """The tenant that alone may use an adapter; empty: all. What the configuration says cannot be changed at run
        time."""
        owner = self.adapter_owners.get(name)
        if owner:
            return owner
        status = (self.backend.adapters or {}).get(name)
        return "" if status is None else status.owner

    def allowed(self, access: Access) -> bool:
        """Whether it exists for a caller. An adapter runs on its base model, so both must be allowed."""
        if not self.adapter:
            return access.allows("model", self.name, aliases=self.aliases)
        base = (self.base, *self.base_aliases)
        return access.allows("adapter", self.adapter, self.adapter_owner(self.adapter)) and access.allows(
            "model", base[0], aliases=base[1:]
        )

    def adapted(self, access: Access) -> list[ServedModel]:
        """The same model with each of its adapters that exist for a caller, to be listed: no text of theirs is read."""
        found = map(self.with_adapter, self.adapter_names)
        return [model for model in found if model.allowed(access)]

    def with_adapter(self, name: str) -> ServedModel:
        """The same model and engine with an adapter; its text is still the model's, see `read_text`."""
        return dataclasses.replace(
            self, name=name, adapter=name, base=self.name, aliases=(), base_aliases=self.aliases, adapters=()
        )

    async def prepare_text(self) -> None:
        """Have the tokenizer and the template that the adapter brings read, if it is one: off the event loop."""
        if self.adapter and self.adapter_texts is not None:
            await self.adapter_texts.prepare(self.adapter_source(self.adapter))

    def read_text(self) -> None:
        """Use the tokenizer and the template that the adapter brings, if it is one."""
        if self.adapter and self.adapter_texts is not None:
            try:
                self.text = self.adapter_texts.of(self.adapter_source(self.adapter))
            except CheckpointError as error:
                raise InvalidRequest(f"The adapter `{self.adapter}` cannot be used: {error}", param="model") from error

    def adapter_source(self, name: str) -> str:
        """Where an adapter is; empty: not known."""
        status = (self.backend.adapters or {}).get(name)
        return self.adapter_sources.get(name, "") if status is None else status.source

    @property
    def context_window(self) -> int | None:
        info = self.backend.info
        return info.max_model_len if info is not None else self.text.context_length

    @property
    def slots(self) -> int:
        """How many requests its engines run at once; 0 while none is up."""
        engines = (engine for engine in self.backend.replicas if engine.ready)
        return sum(engine.info.max_running for engine in engines if engine.info is not None)

    @property
    def on_demand(self) -> bool:
        """Whether a request starts its first replica."""
        return isinstance(self.backend, ReplicaSet) and self.backend.hold is not None

    @property
    def state(self) -> str:
        """The state of its engines; `asleep`: there is none, and a request starts one."""
        if isinstance(self.backend, ReplicaSet) and self.backend.asleep:
            return "asleep"
        return self.backend.state if self.backend.ready else "starting"

    @property
    def fingerprint(self) -> str:
        """Equal when the same build serves the same model in the same number format on the same device."""
        info = self.backend.info
        return _fingerprint(self.name, *((info.dtype, info.device) if info is not None else ()))


@functools.lru_cache(maxsize=1024)
def _fingerprint(*parts: str) -> str:
    return "fp_" + hashlib.sha256("\0".join((penstock.__version__, *parts)).encode()).hexdigest()[:10]


EXPERIMENT = "experiment"
"""Why a model is found under the name of an experiment."""


@dataclass(frozen=True, slots=True)
class Route:
    """The model that answers, and why it was chosen (`x-penstock-route`)."""

    model: ServedModel
    why: str


class ModelRegistry:
    """Every served model, by name and alias."""

    def __init__(self, models: Iterable[ServedModel], remotes: Iterable[RemoteModel] = ()) -> None:
        self.stand_ins: dict[str, str] = {}
        """Names of experiments, each with the model that it stands for where no arm is chosen."""
        self._models: dict[str, ServedModel] = {}
        self._routes: dict[str, Route] = {}
        for model in models:
            self._models[model.name] = model
            self._claim(model.name, Route(model, "direct"))
        for model in self._models.values():
            for alias in model.aliases:
                self._claim(alias, Route(model, "alias"))
        self.remotes = {remote.name: remote for remote in remotes}
        self._remote_names: dict[str, RemoteModel] = {}
        for remote in self.remotes.values():
            for name in (remote.name, *remote.aliases):
                if name in self._routes or name in self._remote_names:
                    raise ConfigError(f"two models are called `{name}`; names and aliases must differ")
                self._remote_names[name] = remote

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._models.values()))

    @property
    def first(self) -> ServedModel:
        """The model of requests that need none by name."""
        for model in self:
            return model
        raise ModelNotFound("", [])

    def add(self, model: ServedModel) -> None:
        """Adds a model; ConfigError when one of its names is taken."""
        taken = [name for name in (model.name, *model.aliases) if self.named(name)]
        if taken:
            raise ConfigError(f"two models are called `{taken[0]}`; names and aliases must differ")
        self._models[model.name] = model
        self._routes |= {alias: Route(model, "alias") for alias in model.aliases}
        self._routes[model.name] = Route(model, "direct")

    def rename(self, model: ServedModel, aliases: tuple[str, ...]) -> None:
        """Gives a model other aliases; ConfigError when one is taken."""
        taken = [name for name in aliases if name not in model.aliases and self.named(name)]
        if taken:
            raise ConfigError(f"two models are called `{taken[0]}`; names and aliases must differ")
        for alias in model.aliases:
            self._routes.pop(alias, None)
        self._routes |= {alias: Route(model, "alias") for alias in aliases}

    def remove(self, name: str) -> ServedModel:
        """Removes a model for new requests; running ones may finish."""
        model = self._models.pop(name)
        self._routes = {known: route for known, route in self._routes.items() if route.model is not model}
        return model

    def find(self, name: str) -> Route | RemoteModel | None:
        """What is called `name`, for whomever it exists. No text of an adapter is read for that: see `route`."""
        route = self._routes.get(name)
        if route is not None:
            return route
        for model in self._models.values():
            if name in model.adapter_names:
                return Route(model.with_adapter(name), "adapter")
        found = self._remote_names.get(name)
        if found is None and name in self.stand_ins:
            control = self.find(self.stand_ins[name])
            return Route(control.model, EXPERIMENT) if isinstance(control, Route) else control
        return found

    async def prepare(self, name: str) -> None:
        """Await this before `route`, which would read files of an adapter's text on the event loop otherwise. Nothing
        is done for a name that does not exist."""
        found = self.find(name)
        if isinstance(found, Route):
            await found.model.prepare_text()

    def route(self, name: str) -> Route:
        """The model that runs here under `name`. For requests, `Permissions` has checked before that it exists for the
        caller."""
        found = self.find(name)
        if isinstance(found, Route):
            found.model.read_text()
            return found
        if found is not None:
            raise InvalidRequest(
                f"`{name}` runs on another server and its tokenizer is not available here; use the chat API.",
                param="model",
                code="remote_model",
            )
        raise ModelNotFound(name[:256])

    def names(self, access: Access) -> list[str]:
        """Every name of a model, adapter or remote that exists for a caller."""
        found = [name for name, route in self._routes.items() if route.model.allowed(access)]
        found += [name for name, remote in self._remote_names.items() if remote.allowed(access)]
        return found + [adapter.name for model in self for adapter in model.adapted(access)]

    def allows(self, access: Access, name: str) -> bool:
        """Whether there is a model, adapter or remote called `name` that exists for a caller."""
        found = self.find(name)
        if found is None:
            return False
        return found.allowed(access) if isinstance(found, RemoteModel) else found.model.allowed(access)

    def remote(self, name: str) -> RemoteModel | None:
        """The remote model with this name or alias, if any."""
        return self._remote_names.get(self.stand_ins.get(name, name))

    def base_name(self, name: str) -> str:
        """The model behind a name: without its adapter, not an alias."""
        remote = self._remote_names.get(name)
        return self.route(name).model.base_name if remote is None else remote.name

    def chain(self, name: str, waiting: Callable[[ServedModel], int] = lambda model: 0) -> list[tuple[str, str]]:
        """The models to try for `name`, in order, each with the reason it was chosen (`x-penstock-route`; empty for the
        model itself). `waiting`: the number of requests queued for a model in the gateway."""
        remote = self._remote_names.get(name)
        if remote is not None:
            return [(name, ""), *((other, "fallback") for other in remote.fallback if other != name)]
        model = self.route(name).model
        others = [other for other in model.fallback if other != name]
        if others and model.overflows(waiting(model)):
            return [*((other, "overflow") for other in others), (name, "")]
        return [(name, ""), *((other, "fallback") for other in others)]

    def named(self, name: str) -> bool:
        """Whether a model or alias has this name; adapters do not count."""
        return name in self._routes or name in self._remote_names or name in self.stand_ins

    def _claim(self, name: str, route: Route) -> None:
        if name in self._routes:
            raise ConfigError(f"two models are called `{name}`; names and aliases must differ")
        self._routes[name] = route
