"""What goes into an encoder engine and what comes out. Plain dataclasses, importable without torch.

One request holds all texts of one caller; the engine mixes the texts of all requests in its batches and answers a
request once, when the last of its texts is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.engine.request import StepOutput

Wanted = Literal["sentence", "tokens", "both", "late", "score"]
"""`sentence`: one unit vector per text. `tokens`: a unit vector per token. `both`: that of the text, then those of its
tokens. `late`: one number per text after the first,
how well it answers the first (late interaction). `score`: one number per pair, from a cross-encoder's head."""


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """Texts to encode, as token ids with the model's own beginning and end."""

    request_id: str
    texts: list[list[int]]
    wanted: Wanted = "sentence"
    seconds: list[int] | None = None
    """For pairs, per text: where its second part begins."""
    priority: int = 0
    """Smaller goes first."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """The answer to one request: float32 in this machine's order, row after row, text after text."""

    request_id: str
    numbers: bytes
    queue_s: float
    """From arrival to the first of its texts being computed."""
    compute_s: float
    """From there to the last one."""


@dataclass(slots=True)
class EncodeOutput(StepOutput):
    """What one step finished. Requests that failed are in `deltas`, as with any engine."""

    encodings: list[Encoding]
