"""The cut of top-k, top-p and min-p, in plain PyTorch: the definition, and what runs on the CPU.

A token is kept when fewer than k tokens are larger, when the tokens larger than it hold less than p of the mass (of
what top-k keeps), and when it is at least min_p times as likely as the best. Each rule is a threshold on the scaled
logit, so ties at the boundary stay in.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CANDIDATES = 512
"""The cut is looked for among this many most likely tokens first; the whole vocabulary is sorted only when that is not
enough."""


def thresholds(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """See `Ops.filter_thresholds`. Rows that filter nothing cost nothing."""
    out = torch.full_like(temperatures, float("-inf"))
    at = ((temperatures > 0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))).nonzero().squeeze(1)
    if len(at):
        out[at] = _thresholds(logits[at].float() / temperatures[at].unsqueeze(1), top_k[at], top_p[at], min_p[at])
    return out


def drop_below(logits: Tensor, temperatures: Tensor, cut: Tensor) -> Tensor:
    """`logits` with -inf where logit / temperature lies below `cut` [rows]."""
    scaled = logits / torch.where(temperatures > 0, temperatures, 1.0).unsqueeze(1)
    return logits.masked_fill(scaled < cut.unsqueeze(1), float("-inf"))


def _thresholds(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    vocab = scaled.shape[1]
    norm = scaled.logsumexp(-1, keepdim=True)
    floor = scaled.amax(-1) + min_p.log()
    cut = _cutoff(scaled, norm, top_k, top_p, min(_CANDIDATES, vocab))
    if cut is None:
        cut = _cutoff(scaled, norm, top_k, top_p, vocab)
    assert cut is not None
    return torch.maximum(cut.squeeze(1), floor)


def _cutoff(scaled: Tensor, norm: Tensor, top_k: Tensor, top_p: Tensor, count: int) -> Tensor | None:
    """The smallest logit that top-k and top-p keep; None when `count` candidates do not decide it."""
    vocab = scaled.shape[1]
    limit = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    ordered = scaled.topk(count, dim=-1).values
    mass = (ordered - norm).exp()
    # top-p is taken over what top-k left, so its mass is renormalized to that.
    inside = torch.arange(count, device=scaled.device) < limit.unsqueeze(1)
    mass = mass * inside
    total = torch.where(top_k > 0, mass.sum(-1), 1.0)
    before = mass.cumsum(-1) - mass
    keep = inside & (before < (top_p * total).unsqueeze(1))
    keep[:, 0] = True
    unlimited = (top_p >= 1.0) & (top_k == 0)
    if count < vocab:
        # A top-k beyond the candidates leaves even the mass to share out unknown.
        undecided = (limit > count) & (keep[:, -1] | (top_k > 0))
        if bool((undecided & ~unlimited).any()):
            return None
    last = ordered.gather(1, keep.sum(-1, keepdim=True) - 1)
    return torch.where(unlimited.unsqueeze(1), float("-inf"), last)
