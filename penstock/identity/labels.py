"""Labels and demands: the data rules.

Labels say where and by whom a model, remote, pool, encoder or tool is run: `region=eu`, `external=false`. A demand
names labels that whatever gets a request's data must have. Tiers, tenants, keys, guardrails and the request itself add
to it. Invariants: a demand can only be narrowed, and a label that is missing does not meet it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from penstock.config.labels import ALTERNATIVE, LABEL_NAME, MOST_LABELS, NAME_HELP, VALUE_HELP, label_problem
from penstock.errors import PenstockError

EXTERNAL = "external"
"""Whether it is run by somebody else: true of remotes unless they say otherwise, false of what runs here."""
REGION = "region"


class LabelError(PenstockError):
    """Labels or a demand that cannot be read."""


class Labels(Mapping[str, str]):
    """The labels of one thing. Frozen."""

    __slots__ = ("_labels",)

    def __init__(self, labels: Mapping[str, str] | Iterable[tuple[str, str]] = ()) -> None:
        self._labels = dict(labels)

    def __getitem__(self, name: str) -> str:
        return self._labels[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __hash__(self) -> int:
        return hash(frozenset(self._labels.items()))

    def __repr__(self) -> str:
        return f"Labels({self})"

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._labels.items())

    def over(self, others: Mapping[str, str]) -> Labels:
        """These, and those of `others` that these do not name."""
        return Labels({**others, **self._labels})


NO_LABELS = Labels()
OF_REMOTES = Labels({EXTERNAL: "true"})
"""What holds for a remote that does not say otherwise."""
OF_OWN = Labels({EXTERNAL: "false"})
"""The same for what runs here."""


class Requirement(Struct, frozen=True):
    """A label that must have one of some values."""

    label: str
    values: tuple[str, ...]
    rule: str = ""
    """Who demands it, for errors and the audit log: `tenant acme`, `guardrail pii`, `x-penstock-require`."""

    def __str__(self) -> str:
        return f"{self.label}={ALTERNATIVE.join(self.values)}"

    def met_by(self, labels: Mapping[str, str]) -> bool:
        return labels.get(self.label) in self.values


class Demand(Struct, frozen=True):
    """All labels that a request needs. Empty: none."""

    requirements: tuple[Requirement, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.requirements)

    def __str__(self) -> str:
        return ", ".join(map(str, self.requirements))

    def narrowed(self, other: Demand) -> Demand:
        """Both demands together."""
        if not other.requirements:
            return self
        if not self.requirements:
            return other
        return Demand(tuple(dict.fromkeys((*self.requirements, *other.requirements))))

    def unmet(self, labels: Mapping[str, str]) -> list[Requirement]:
        """The requirements that these labels do not meet."""
        return [requirement for requirement in self.requirements if not requirement.met_by(labels)]

    def permitted(self, label: str) -> tuple[str, ...] | None:
        """The values that a label may have; None: any, or none at all."""
        found: tuple[str, ...] | None = None
        for requirement in self.requirements:
            if requirement.label == label:
                values = requirement.values
                found = values if found is None else tuple(value for value in found if value in values)
        return found

    def without(self, label: str) -> Demand:
        """All requirements but those about one label, which is checked elsewhere."""
        return Demand(tuple(one for one in self.requirements if one.label != label))

    def why(self, unmet: Iterable[Requirement]) -> str:
        """Which rules demand what is not met."""
        return "; ".join(f"{one.rule or 'a data rule'} requires {one}" for one in unmet)

    @property
    def pairs(self) -> dict[str, str]:
        """As it is stored and shown, without its rules."""
        names = dict.fromkeys(requirement.label for requirement in self.requirements)
        return {name: ALTERNATIVE.join(self.permitted(name) or ()) for name in names}


NO_DEMAND = Demand()


def closest(demand: Demand, places: Iterable[Mapping[str, str]]) -> list[Requirement]:
    """What the place that comes closest does not meet; empty: there is one that meets all of the demand."""
    best = list(demand.requirements)
    for labels in places:
        missing = demand.unmet(labels)
        if not missing:
            return []
        if len(missing) < len(best):
            best = missing
    return best


RequireField = Annotated[dict[str, str | bool | list[str]], Meta(max_length=MOST_LABELS)]
"""A demand in the admin API: `{"region": ["eu", "ch"], "external": false}`."""


def demand_of(pairs: Iterable[tuple[str, object]], rule: str) -> Demand:
    """The demand that a mapping spells out. A value is text (`eu|ch`), true or false, or a list of them."""
    found = []
    for name, value in pairs:
        values = _values(value)
        for each in values or ("",):
            if problem := label_problem(name, each):
                raise LabelError(problem)
        found.append(Requirement(name, values, rule))
    if len(found) > MOST_LABELS:
        raise LabelError(f"at most {MOST_LABELS} labels can be demanded, not {len(found)}")
    return Demand(tuple(found))


def _values(value: object) -> tuple[str, ...]:
    if isinstance(value, bool):
        return ("true" if value else "false",)
    if isinstance(value, list | tuple):
        return tuple(dict.fromkeys(one for each in value for one in _values(each)))
    return tuple(dict.fromkeys(_normal(each.strip()) for each in str(value).split(ALTERNATIVE)))


def _normal(value: str) -> str:
    """`True` and `FALSE` are spellings of true and false; any other value stands as it is."""
    return value.lower() if value.lower() in ("true", "false") else value


def parse_demand(text: str, rule: str) -> Demand:
    """The demand `region=eu, external=false`; `region=eu|ch` permits either."""
    found: list[tuple[str, object]] = []
    for part in text.split(","):
        name, equals, value = part.partition("=")
        name = name.strip().lower()
        if not equals or not LABEL_NAME.fullmatch(name):
            raise LabelError(f"a demand is LABEL=VALUE, LABEL=VALUE ..., not {part.strip()[:80]!r}; {NAME_HELP}")
        if not value.strip():
            raise LabelError(f"`{name}=` has no value; {VALUE_HELP}")
        found.append((name, value))
    return demand_of(found, rule)


_stored_decoder = msgspec.json.Decoder(dict[str, str])


def stored_demand(demand: Demand) -> str:
    """The stored text; empty when nothing is demanded."""
    return msgspec.json.encode(demand.pairs).decode() if demand else ""


def read_demand(text: str, rule: str) -> Demand:
    return demand_of(_stored_decoder.decode(text).items(), rule) if text else NO_DEMAND
