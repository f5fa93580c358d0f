"""What limits and the ledger need to know about work: a generation, an encoding, or an answer from a cache."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Protocol

from penstock.metering.prices import Usage


class NamedModel(Protocol):
    """What a price is looked up by."""

    @property
    def base_name(self) -> str: ...

    @property
    def adapter(self) -> str: ...


class Metered(Protocol):
    """Work that is counted and paid for."""

    @property
    def id(self) -> str:
        """Of its charge; never used before."""

    @property
    def model(self) -> NamedModel: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def cached_tokens(self) -> int: ...

    @property
    def completion_tokens(self) -> int: ...

    @property
    def reasoning_tokens(self) -> int:
        """Completion tokens that are thoughts, as far as that is known."""

    @property
    def most_completion_tokens(self) -> int: ...

    @property
    def from_cache(self) -> bool:
        """Whether the answer was found in the response cache."""

    @property
    def resumable(self) -> bool:
        """Whether the client may come back for the rest of it, at another gateway too."""

    @property
    def before(self) -> Usage | None:
        """Of a resumed stream: what limits and metrics have counted already."""

    @property
    def billable(self) -> bool:
        """Whether the client got anything for it."""

    @property
    def complete(self) -> bool:
        """Whether it came to its end."""


@dataclass(frozen=True, slots=True)
class ModelName:
    base_name: str
    adapter: str = ""


@dataclass(slots=True)
class FixedWork:
    """Work whose size is known before it begins; billable once it is done."""

    model: ModelName
    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    most_completion_tokens: int = 0
    billable: bool = False
    from_cache: bool = False
    resumable: bool = False
    before: Usage | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def complete(self) -> bool:
        return self.billable
