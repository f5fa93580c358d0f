"""The interfaces through which a host runs an engine: text generation, encoding, sleep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from penstock.engine.encoder.request import EncodeRequest
from penstock.engine.request import EngineInfo, EngineLoad, Request, StepOutput
from penstock.engine_host.adapters import AdapterHost


class EngineLike(AdapterHost, Protocol):
    """An engine of any kind."""

    info: EngineInfo

    def submit(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def step(self) -> StepOutput | None: ...

    def load_snapshot(self) -> EngineLoad: ...

    @property
    def has_work(self) -> bool: ...


@runtime_checkable
class EncoderLike(Protocol):
    """An engine that also encodes texts."""

    def encode(self, request: EncodeRequest) -> None: ...


@runtime_checkable
class BeginsPrompts(Protocol):
    """An engine that says when it begins to compute a prompt; see `Engine.on_begun`."""

    on_begun: Callable[[list[str]], None]


class Sleeper(Protocol):
    """Puts the engine to sleep and wakes it; see `penstock.engine.sleep.sleep`."""

    def sleep(self, engine: Any) -> EngineLike:
        """Free the memory of an idle engine; returns its stand-in until it wakes."""
        ...

    def collect(self) -> None:
        """Called once nothing refers to the engine any more."""
        ...

    def wake(self, sleeping: Any) -> EngineLike: ...
