"""What captured steps keep of a GPU's memory: the rules of `engine.backends.cuda.graph_memory`, without torch.

Graphs share what they compute, logits too: those of the step that samples most rows.
"""

from __future__ import annotations

from penstock.planning.deployment import Deployment

REST = 3 << 29
"""Activations of the largest captured step, code of kernels, workspaces of libraries."""
_PROMPTS, _LEAST_TOKENS = 8, 32
"""Most prompts in a captured step, and the tokens of the smallest of these."""
_MOST_BESIDE, _LEAST_TOKENS_BESIDE = 256, 64
"""Most decodes beside prompts, and the fewest tokens of prompts beside decodes."""
_MOST_VERIFIED = 64


def graph_bytes(deployment: Deployment) -> int:
    """Of each device. Stages of a pipeline capture nothing."""
    if deployment.device.kind != "gpu" or deployment.pipeline_parallel > 1:
        return 0
    shape = deployment.shape
    row = shape.vocab * deployment.weights.dense_bytes
    return REST + (0 if _launched_eagerly(deployment) else round(most_sampled(deployment) * row))


def most_sampled(deployment: Deployment) -> int:
    """Rows that the largest captured step samples."""
    rows = deployment.most_running
    if (drafts := deployment.speculation) is not None:
        rows = max(rows, min(rows * (1 + drafts.depth), _MOST_VERIFIED))
    tokens = min(deployment.step_tokens, deployment.context_len)
    if tokens >= _LEAST_TOKENS_BESIDE:
        return max(rows, min(rows, _MOST_BESIDE) + _PROMPTS)
    return max(rows, _PROMPTS) if tokens >= _LEAST_TOKENS else rows


def _launched_eagerly(deployment: Deployment) -> bool:
    """See `Decoder.launched_eagerly`."""
    shape = deployment.shape
    gated = shape.mla is not None and shape.mla.gate_rank > 0
    streams = shape.apart_streams or shape.mixed_streams or shape.gated_streams is not None
    streams = streams or shape.compression is not None
    return bool(streams or shape.kept_layers or gated or shape.sparse_blocks is not None)
