"""Where a replica is: its pool, region, zone and machine; and how an endpoint that is given by hand says it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl

from penstock.errors import ConfigError

_LABELS = ("pool", "region", "zone", "machine")


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """Empty: not said."""

    pool: str = ""
    region: str = ""
    zone: str = ""
    machine: str = ""


NOWHERE = ReplicaPlace()


def split_endpoint(labelled: str) -> tuple[str, ReplicaPlace]:
    """The endpoint and the place of `tcp://HOST:PORT?pool=batch&region=eu`."""
    endpoint, question, query = labelled.partition("?")
    if not question:
        return endpoint, NOWHERE
    labels = dict(parse_qsl(query, keep_blank_values=True))
    unknown = labels.keys() - set(_LABELS)
    if unknown or not labels:
        wrong = ", ".join(sorted(unknown)) or query
        raise ConfigError(f"{labelled}: unknown label {wrong!r} of an endpoint; there are {', '.join(_LABELS)}")
    return endpoint, ReplicaPlace(**labels)


def labelled_endpoint(endpoint: str, place: ReplicaPlace) -> str:
    """The reverse of `split_endpoint`."""
    labels = [f"{name}={value}" for name in _LABELS if (value := getattr(place, name))]
    return f"{endpoint}?{'&'.join(labels)}" if labels else endpoint
