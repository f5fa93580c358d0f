"""All dialects by name."""

from __future__ import annotations

from penstock.backends.remote.dialect import Dialect
from penstock.backends.remote.openai import OpenAI
from penstock.backends.remote.upstream import DialectName, Upstream
from penstock.errors import ConfigError

DIALECTS: dict[DialectName, type[Dialect]] = {"openai": OpenAI}


def make_dialect(upstream: Upstream) -> Dialect:
    if upstream.dialect not in DIALECTS:
        raise ConfigError(f"there is no dialect `{upstream.dialect}`")
    return DIALECTS[upstream.dialect](upstream)
