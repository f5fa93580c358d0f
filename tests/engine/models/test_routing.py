"""Routers choose what the published rules of their families choose, written out one token at a time."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.models.layers.experts import Router
from penstock.engine.models.moe_config import MoeConfig
from penstock.errors import CheckpointError


def test_sigmoid_scores_with_correction_and_groups() -> None:
    torch.manual_seed(0)
    logits, bias = torch.randn(50, 24) * 2, torch.randn(24) * 0.2
    router = Router(lambda x: x, 4, True, "sigmoid", bias, 6, 3, "best_two", 2.5)  # type: ignore[arg-type]
    weights, experts = router(logits)
    for row, chosen, weight in zip(logits, experts.tolist(), weights, strict=True):
        score = row.sigmoid()
        choice = score + bias
        groups = [sorted(choice[g * 4 : g * 4 + 4].tolist(), reverse=True)[:2] for g in range(6)]
        best = sorted(range(6), key=lambda g: -sum(groups[g]))[:3]
        allowed = [e for e in range(24) if e // 4 in best]
        wanted = sorted(allowed, key=lambda e: -float(choice[e]))[:4]
        assert chosen == wanted
        torch.testing.assert_close(weight, score[wanted] / score[wanted].sum() * 2.5)


def test_softmax_scores_of_the_best_groups() -> None:
    torch.manual_seed(1)
    logits = torch.randn(50, 12)
    weights, experts = Router(lambda x: x, 3, False, groups=4, top_groups=2, scale=16.0)(logits)  # type: ignore[arg-type]
    for row, chosen, weight in zip(logits, experts.tolist(), weights, strict=True):
        score = row.softmax(-1)
        best = sorted(range(4), key=lambda g: -float(score[g * 3 : g * 3 + 3].max()))[:2]
        wanted = sorted((e for e in range(12) if e // 3 in best), key=lambda e: -float(score[e]))[:3]
        assert chosen == wanted
        torch.testing.assert_close(weight, score[wanted] * 16.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": 5}, "5 groups"),
        ({"groups": 4, "top_groups": 5}, "5 chosen"),
        ({"groups": 8, "top_groups": 4, "group_score": "best_two"}, "no two best"),
        ({"groups": 4, "top_groups": 1, "scoring": "sigmoid"}, "cannot visit 3 experts"),
    ],
)
def test_what_cannot_be_chosen_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        MoeConfig(experts=8, top_k=3, ffn_size=4, normalize=True, layers=(True,), **changes)  # type: ignore[arg-type]
