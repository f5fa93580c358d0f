"""The root of the error tree.

Everything the project raises on purpose derives from `PenstockError`, so a caller can tell "we refused, and
here is why" from a bug. Errors that travel to HTTP clients live in `penstock.protocol.errors`.
"""


class PenstockError(Exception):
    """Base of every error raised on purpose; the message is written for a person."""


class ConfigError(PenstockError):
    """The configuration, a flag or an environment variable cannot be used as given."""


class CheckpointError(PenstockError):
    """A checkpoint is missing, damaged, or of a kind this engine does not run."""


class SourceError(PenstockError):
    """A model could not be found or fetched from its source."""


class ReplicaLost(PenstockError):
    """A part of this engine is gone and the rest cannot go on; it must be started again."""
