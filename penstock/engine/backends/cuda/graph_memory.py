"""What captured steps keep of the device's memory, so that a cache leaves it to them."""

from __future__ import annotations

from penstock.engine.backends.cuda.prompt_graphs import shapes_for
from penstock.engine.backends.interface import StepLimits
from penstock.engine.models.decoder import Decoder

_REST = 3 << 29
"""Activations of the largest captured step, code of kernels, workspaces of libraries, and what the driver keeps of each
graph. `bench_memory_of_graphs` in `tests/gpu` measures them."""


def graph_bytes(decoder: Decoder, limits: StepLimits) -> int:
    """Graphs share what they compute, logits too (`GraphPool`): those of the step that samples most rows."""
    if decoder.launched_eagerly:
        return _REST
    rows = limits.max_rows
    if not decoder.ops.batch_invariant:  # which computes prompts token by token
        shapes = shapes_for(limits.max_rows, limits.max_context)
        rows = max([rows, *(shape.samples for shape in shapes if shape.tokens <= limits.budget)])
    return _REST + rows * decoder.config.vocab_size * decoder.embedding.element_size()
