"""The first message to a rank, from the process that started it: rank 0, or the one that joins from another machine."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from penstock.engine.config import EngineConfig
from penstock.engine.parallel import plain
from penstock.engine.parallel.layout import Place


@dataclass(frozen=True, slots=True)
class Setup:
    """What a rank needs to know to load its part."""

    config: EngineConfig
    checkpoint: object | None
    """In place of the one that `config` names."""
    place: Place
    folder: Path
    """Where the ranks of this machine meet."""
    generation: int = 0
    """How often ranks have been started again."""

    def encode(self) -> bytes:
        # A checkpoint of another kind is a Python object, which only a parent may hand to its child.
        checkpoint = None if self.checkpoint is None else pickle.dumps(self.checkpoint)
        return plain.encode((self.config, checkpoint, self.place, self.folder, self.generation))

    @classmethod
    def receive(cls, connection: Connection) -> Setup:
        """Only from the parent process."""
        config, checkpoint, place, folder, generation = plain.receive(connection)
        return cls(config, None if checkpoint is None else pickle.loads(checkpoint), place, folder, generation)
