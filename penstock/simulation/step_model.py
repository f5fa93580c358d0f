"""How long a step takes, as the simulated replica asks for it: `planning.step_time.StepTime` or anything like it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class StepModel(Protocol):
    """Fast-forward is fast where the time grows linearly with the context, at a fixed number of decodes."""

    def of(self, decodes: int, context: int, prefill: int, attended: int, samples: int) -> float:
        """Seconds of a step; see `planning.step_time.StepWork` for the numbers."""
        ...


@dataclass(frozen=True, slots=True)
class LinearSteps:
    """A step time of a few constants; the defaults are about those of an 8B model on one large GPU."""

    step_s: float = 0.008
    """Reading the weights, in every step."""
    prefill_token_s: float = 60e-6
    attended_s: float = 0.0
    """Each position that a prompt token attends to."""
    decode_s: float = 40e-6
    """Each decoding sequence."""
    context_token_s: float = 15e-9
    """Each token of context that a decoding sequence reads."""
    sample_s: float = 0.0

    def of(self, decodes: int, context: int, prefill: int, attended: int, samples: int) -> float:
        return (
            self.step_s
            + decodes * self.decode_s
            + context * self.context_token_s
            + prefill * self.prefill_token_s
            + attended * self.attended_s
            + samples * self.sample_s
        )
