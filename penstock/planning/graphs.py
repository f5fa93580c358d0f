"""What captured steps keep of a GPU's memory: the rules of `engine.backends.cuda.graph_memory`, without torch.

Each graph has logits of its own, of every row that it can sample; whatever else it needs they share.
"""

from __future__ import annotations

from penstock.planning.deployment import Deployment

REST = 1 << 30
"""Activations of the largest captured step, code of kernels, workspaces of libraries."""
ADAPTED = 3
"""Further kinds of steps where there are adapters: with any, with narrow ones, with those that touch more."""
_TOKENS = (*range(32, 256, 32), *range(256, 512, 64), *range(512, 1025, 128))
_TOKENS_BESIDE = (64, 128, 192, 256, 384, 512, 640, 768, 896, 1024)
_DECODES_BESIDE = (16, 32, 64, 96, 128, 192, 256)
_PROMPTS = 8
_MOST_VERIFIED = 64


def graph_bytes(deployment: Deployment) -> int:
    """Of each device. Stages of a pipeline capture nothing."""
    if deployment.device.kind != "gpu" or deployment.pipeline_parallel > 1:
        return 0
    shape = deployment.shape
    row = shape.vocab * deployment.weights.dense_bytes
    return REST + (0 if _launched_eagerly(deployment) else round(captured_rows(deployment) * row))


def captured_rows(deployment: Deployment) -> int:
    """That all graphs together can sample."""
    rows, shape = deployment.most_running, deployment.shape
    if (drafts := deployment.speculation) is not None:
        rows = max(rows, min(rows * (1 + drafts.depth), _MOST_VERIFIED))
    kinds: int = 1 + (shape.mla is not None and shape.mla.index_dim > 0) + ADAPTED * (deployment.adapter_slots > 0)
    decodes: int = kinds * sum({size for size in (1, 2, 3, 4, 6, 8, *range(16, rows, 8), rows) if size <= rows})
    most = min(deployment.step_tokens, deployment.context_len)
    alone, beside = (len([tokens for tokens in sizes if tokens <= most]) for sizes in (_TOKENS, _TOKENS_BESIDE))
    each_beside: int = sum(count + _PROMPTS for count in {min(count, rows) for count in _DECODES_BESIDE})
    return decodes + _PROMPTS * alone + beside * each_beside


def _launched_eagerly(deployment: Deployment) -> bool:
    """See `Decoder.launched_eagerly`."""
    shape = deployment.shape
    gated = shape.mla is not None and shape.mla.gate_rank > 0
    streams = shape.apart_streams or shape.gated_streams is not None or shape.compression is not None
    return bool(streams or shape.kept_layers or gated or shape.sparse_blocks is not None)
