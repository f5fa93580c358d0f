"""What captured steps keep of the device's memory, so that a cache leaves it to them."""

from __future__ import annotations

from penstock.engine.adapters.runtime import AdaptedModel
from penstock.engine.backends.cuda.decode_graphs import buckets_up_to
from penstock.engine.backends.cuda.prompt_graphs import shapes_for
from penstock.engine.backends.interface import StepLimits
from penstock.engine.models.decoder import Decoder

_REST = 1 << 30
"""Activations of the largest captured step, code of kernels, workspaces of libraries."""


def graph_bytes(decoder: Decoder, limits: StepLimits, adapters: AdaptedModel | None) -> int:
    """Each graph has logits of its own, of every row that it can sample; whatever else it needs they share."""
    if decoder.launched_eagerly:
        return _REST
    kinds = [True, decoder.captured_context is not None and limits.max_context > decoder.captured_context]
    if adapters is not None:
        kinds += [True, adapters.narrow is not None, adapters.further is not None]
    rows = sum(kinds) * sum(buckets_up_to(limits.max_rows))
    if not decoder.ops.batch_invariant:  # which computes prompts token by token
        shapes = shapes_for(limits.max_rows, limits.max_context)
        rows += sum(shape.samples for shape in shapes if shape.tokens <= limits.budget)
    return _REST + rows * decoder.config.vocab_size * decoder.embedding.element_size()
