"""How the steps of a model are run: what a runner asks of the executor that its backend supplies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from penstock.engine.backends.interface import TimedStep
from penstock.engine.batch import Batch
from penstock.engine.runner.step import DrawnAhead, PendingStep
from penstock.engine.sequence import Sequence


class Releasable:
    """Remembers addresses of device memory, as captured steps do."""

    def release(self) -> Callable[[], None]:
        """Drop what remembers addresses, because memory is about to move; the result makes it again."""
        return lambda: None


class Executor(Releasable, ABC):
    """Runs the steps of one model. `run` returns without waiting where the device works by itself."""

    phase = ""
    """What `prepare` is called in reports of starting; empty where it is not worth reporting."""
    prefers_single_tokens = False
    """Whether a few tokens of one sequence run faster as that many decodes than as one chunk."""

    @abstractmethod
    def run(self, batch: Batch) -> PendingStep:
        """Launch one step."""

    def draw_ahead(self, counts: Mapping[Sequence, int]) -> DrawnAhead | None:
        """Launch the drawing of that many more tokens of each sequence, behind those that the last step sampled; the
        rows know the blocks of all of them. None: not here, they have to be drawn step by step."""
        return None

    def prepare(self, token_budget: int) -> None:
        """Record or capture the steps to come, of up to `token_budget` tokens, so that none of them waits for it."""

    def improve(self, urgent: Callable[[], bool] = lambda: False) -> bool:
        """Use a moment without work for what makes later steps faster; False when there is nothing left to do.
        `urgent`: asked again and again, whether to stop soon and do it another time."""
        return False

    def catch_up(self, spare_s: float) -> bool:
        """The device is busy with a step for so long: use that for what makes steps faster that are wanted often now,
        if it suffices. Returns whether something was done."""
        return False

    @property
    def recorded(self) -> TimedStep | None:
        """The recording that plain steps run from, if there is one."""
        return None
