"""Which prompt steps of an engine are replayed as CUDA graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from penstock.engine.backends.cuda.prompt_graphs import PromptGraphs, Shape


@contextlib.contextmanager
def watched_prompts() -> Iterator[set[Shape]]:
    """The shapes that are replayed inside."""
    replay, shapes = PromptGraphs.replay, set[Shape]()

    def watched(self: PromptGraphs, packed: Any, shape: Shape) -> Any:
        shapes.add(shape)
        return replay(self, packed, shape)

    PromptGraphs.replay = watched
    try:
        yield shapes
    finally:
        PromptGraphs.replay = replay
