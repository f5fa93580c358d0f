"""How a rank meets the others: through files on its own machine, over a link with ranks on other machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.config import EngineConfig
from penstock.engine.parallel.link import Link


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """What every group of a rank is made with."""

    folder: Path
    """Where the ranks of one machine find each other."""
    timeout_s: float
    """How long any of them may keep the others waiting."""
    machines: tuple[str, ...]
    """The machine of each rank."""
    link: Link | None
    """To ranks on other machines, where there are any."""
    devices: tuple[str, ...] = ()
    """Those of all ranks, where they are named."""
    keeps: bool = False
    """Whether a rank leaves there what one that is started again in its place cannot find out alone."""
    generation: int = 0
    """How often ranks had been started again before this one was started."""

    @classmethod
    def of(cls, config: EngineConfig, folder: Path, link: Link | None, generation: int = 0) -> Rendezvous:
        machines = tuple(config.machine(rank) for rank in range(config.ranks))
        keeps = config.rank_restarts > 0
        return cls(folder, config.watchdog_s, machines, link, config.devices, keeps, generation)

    def meeting_place(self, generation: int) -> Path:
        """The file that the ranks of one generation find each other by."""
        return self.folder / f"store-{generation}"

    def beside(self, rank: int) -> list[int]:
        """The ranks on the machine of `rank`, itself included."""
        return [other for other, machine in enumerate(self.machines) if machine == self.machines[rank]]

    def spans(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks are on more than one machine."""
        return len({self.machines[rank] for rank in ranks}) > 1
