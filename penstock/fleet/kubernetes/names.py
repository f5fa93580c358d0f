"""Names and labels of objects. Kubernetes allows lower-case letters, digits and dashes, and 63 characters at most."""

from __future__ import annotations

import re

from penstock.errors import ConfigError

LONGEST = 52
"""Of a StatefulSet's name: its pods add a number and, in a label, the hash of a revision."""


def dns_label(name: str) -> str:
    """The name of a model as a part of names: `Llama-3.3-70B` becomes `llama-3-3-70b`."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not label:
        raise ConfigError(f"{name!r} has no letter or digit to name Kubernetes objects with; give the model a name")
    return label


def check_label(what: str, name: str) -> None:
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        raise ConfigError(f"{what} {name!r}: lower-case letters, digits and dashes only, beginning with a letter")


def check_length(name: str) -> None:
    if len(name) > LONGEST:
        raise ConfigError(f"{name!r} is too long for a StatefulSet ({LONGEST} characters); shorten the model's name")
