"""What whoever runs an engine needs of it: the engines for text and for vectors, and what puts one to sleep."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from penstock.engine.encoder.request import EncodeRequest
from penstock.engine.request import EngineInfo, Load, Request, StepOutput
from penstock.engine_host.adapters import AdapterHost


class EngineLike(AdapterHost, Protocol):
    """What is needed of any engine."""

    info: EngineInfo

    def submit(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def step(self) -> StepOutput | None: ...

    def load_snapshot(self) -> Load: ...

    @property
    def has_work(self) -> bool: ...


@runtime_checkable
class EncoderLike(Protocol):
    """What is needed of an engine that encodes, besides that."""

    def encode(self, request: EncodeRequest) -> None: ...


class Sleeper(Protocol):
    """Puts the engine to sleep and wakes it; see `penstock.engine.sleep.sleep`."""

    def sleep(self, engine: Any) -> EngineLike:
        """Give back the memory of an idle engine; what stands in for it until it wakes."""
        ...

    def collect(self) -> None:
        """Called when nobody refers to the engine any more."""
        ...

    def wake(self, sleeping: Any) -> EngineLike: ...
