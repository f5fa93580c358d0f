"""The root of the error tree.

Every error raised on purpose derives from `PenstockError`, so callers can distinguish it from a bug. Errors for HTTP
clients are in `penstock.protocol.errors`.
"""


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
    return f"needs packages that are not installed: run `make extras EXTRAS={extra}` in Penstock's folder"
