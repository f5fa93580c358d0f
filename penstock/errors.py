"""The root of the error tree.

Every error raised on purpose derives from `PenstockError`, so callers can distinguish it from a bug. Errors for HTTP
clients are in `penstock.protocol.errors`.
"""

from collections.abc import Mapping
from importlib.util import find_spec

EXTRA_OF: Mapping[str, str] = {
    "torch": "engine",
    "safetensors": "engine",
    "usearch": "knowledge",
    "pypdf": "knowledge",
}
"""The extra that brings a module which a plain `pip install penstock` leaves out."""


class PenstockError(Exception):
    """Base of every error raised on purpose; the message is written for a person."""

    exit_status = 2
    """Of a command that it ends."""


class ConfigError(PenstockError):
    """An invalid configuration file, flag or environment variable."""


class CheckpointError(PenstockError):
    """A checkpoint is missing, damaged or not supported."""


class SourceError(PenstockError):
    """A model could not be found or fetched from its source."""


class ReplicaLost(PenstockError):
    """A rank of this engine died; the engine cannot continue and must be restarted."""


def needs_extra(extra: str) -> str:
    """The end of a sentence about something whose packages are not installed."""
    return (
        f"needs packages that are not installed: run `pip install 'penstock[{extra}]'` "
        f"(in a clone: `make extras EXTRAS={extra}`)"
    )


def require_extra(extra: str, what: str) -> None:
    """Refuse `what` before it has done anything, if the packages of its extra are missing."""
    if any(find_spec(module) is None for module, known in EXTRA_OF.items() if known == extra):
        raise ConfigError(f"{what} {needs_extra(extra)}")
