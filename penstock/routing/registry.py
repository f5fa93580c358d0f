"""Names and aliases of models, and what serves each.

A model's backend is one engine or a `ReplicaSet`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import penstock
from penstock.backends.base import Backend
from penstock.errors import ConfigError
from penstock.protocol.errors import ModelNotFound
from penstock.text import TextModel


@dataclass(slots=True)
class ServedModel:
    """A model that clients can name."""

    name: str
    text: TextModel
    backend: Backend
    aliases: tuple[str, ...] = ()
    input_price: float = 0.0
    """Money per million prompt tokens."""
    output_price: float = 0.0
    cost_per_hour: float = 0.0
    """Dollars that the hardware of one engine costs."""
    tool_format: str = "auto"
    """How it writes function calls; `auto`: as its chat template says."""
    time_slice: str = ""
    """The group of models with which it takes turns; none when empty."""
    adapters: tuple[str, ...] = ()
    """Configured LoRA adapters; once its engine has told of its own, those count."""
    adapter: str = ""
    """Set on a model that is another one with this adapter."""
    base: str = ""
    """The name of that other one."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def base_name(self) -> str:
        """What the engine's metrics call it: adapters count as their base."""
        return self.base or self.name

    @property
    def adapter_names(self) -> list[str]:
        told = self.backend.adapters
        return list(self.adapters if told is None else told)

    def with_adapter(self, name: str) -> ServedModel:
        """The same model, tokenizer and engine, with an adapter."""
        return dataclasses.replace(self, name=name, adapter=name, base=self.name, aliases=(), adapters=())

    @property
    def context_window(self) -> int | None:
        info = self.backend.info
        return info.max_model_len if info is not None else self.text.context_length

    @property
    def fingerprint(self) -> str:
        """Equal when the same build serves the same model in the same number format on the same device."""
        info = self.backend.info
        parts = (penstock.__version__, self.name, *((info.dtype, info.device) if info is not None else ()))
        return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]


@dataclass(frozen=True, slots=True)
class Route:
    """Which model answers, and why that one (`x-penstock-route`)."""

    model: ServedModel
    why: str


class Registry:
    """Every served model, by name and alias."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._models: dict[str, ServedModel] = {}
        self._routes: dict[str, Route] = {}
        for model in models:
            self._models[model.name] = model
            self._claim(model.name, Route(model, "direct"))
        for model in self._models.values():
            for alias in model.aliases:
                self._claim(alias, Route(model, "alias"))

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def route(self, name: str) -> Route:
        route = self._routes.get(name)
        if route is not None:
            return route
        for model in self._models.values():
            if name in model.adapter_names:
                return Route(model.with_adapter(name), "adapter")
        raise ModelNotFound(name[:256], [*self._routes, *(name for model in self for name in model.adapter_names)])

    def named(self, name: str) -> bool:
        """Whether a model or alias, not an adapter, is called this."""
        return name in self._routes

    def _claim(self, name: str, route: Route) -> None:
        if name in self._routes:
            raise ConfigError(f"two models are called `{name}`; names and aliases must differ")
        self._routes[name] = route
