"""Feed-forwards of many experts. See `ModelConfig`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from penstock.errors import CheckpointError

LayerTable = tuple[tuple[int, ...], ...]
"""Which expert each slot of each shard holds: [shard][slot]. Every expert is somewhere, on a shard at most once."""
Scoring = Literal["softmax", "sigmoid", "sqrt_softplus"]
"""How a router's logits become scores: over all experts, or of each by itself."""
GroupScore = Literal["best", "best_two"]
"""The score of a group of experts: its best expert's, or the sum of its best two."""
SMALL_TOTAL = 1e-20
"""What most families, and the CUDA kernels, add to a sum of scores before they divide by it."""


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A feed-forward of many experts, of which each token visits a few, and perhaps one that all tokens visit."""

    experts: int
    top_k: int
    ffn_size: int
    normalize: bool
    """Whether the weights of a token's experts are scaled to sum to one."""
    layers: tuple[bool, ...]
    """Which layers have experts; the others are dense."""
    router_bias: bool = False
    expert_bias: bool = False
    """Whether the matrices of the experts have biases."""
    placement: tuple[LayerTable, ...] = ()
    """Of each layer, which shard holds which experts; empty: every process has all of them, or parts of all."""
    shard: int = 0
    """Whose experts of `placement` this process holds."""
    scoring: Scoring = "softmax"
    correction_bias: bool = False
    """Whether a stored number per expert is added to the scores when experts are chosen; it is in no weight."""
    groups: int = 1
    top_groups: int = 1
    """A token's experts are from this many of the groups, each a run of equally many experts."""
    group_score: GroupScore = "best"
    outside: float = -math.inf
    """What experts of other groups score when experts are chosen."""
    clamp: float = 0.0
    """How far the gates and inputs of experts reach (`ClampedSilu`), where that is so of these alone; 0: no bound."""
    bounds: tuple[float, ...] = ()
    """Of each layer: how far activated gates and inputs of experts reach (`BoundedSilu`), 0 where there is no bound;
    empty: nowhere. See `ModelConfig.bounds`."""
    scale: float = 1.0
    """Factor of the weights, after they were scaled to sum to one."""
    total_eps: float = SMALL_TOTAL
    """Added to the sum that sigmoid weights are divided by: all of them may be zero."""
    weight_inputs: bool = False
    """Whether weights multiply what the experts read, not what they give."""
    logit_softcap: float = 0.0
    """The router's logits l become cap * tanh(l / cap) before they are scores; 0: they stay as they are."""
    logit_scale: float = 1.0
    """Factor of the router's logits."""
    wide_router: bool = False
    """Whether they are computed in float32 from weights that are stored so."""
    shared_ffn_size: int = 0
    """Width of the expert that every token visits; 0: there is none."""
    shared_scale: float = 1.0
    """Factor of what that expert gives."""
    shared_gate: bool = False
    """Whether the shared expert's output is multiplied by the sigmoid of one number of the token."""
    hashed: tuple[bool, ...] = ()
    """In which layers a stored table says by a token's id which experts it visits; empty: in none. They have no
    correction."""
    latent: int = 0
    """Numbers of a token that the experts read and give, between two matrices; 0: all of them."""
    expert_gains: bool = False
    """Whether each expert has a stored factor of its weights, after they were scaled."""

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise CheckpointError(f"a token cannot visit {self.top_k} of {self.experts} experts")
        if self.groups < 1 or self.experts % self.groups or not 0 < self.top_groups <= self.groups:
            raise CheckpointError(f"{self.experts} experts cannot be in {self.groups} groups, {self.top_groups} chosen")
        size = self.experts // self.groups
        if self.groups > 1 and self.group_score == "best_two" and size < 2:
            raise CheckpointError(f"groups of {size} expert have no two best")
        if self.scoring != "softmax" and self.top_k > self.top_groups * size:
            raise CheckpointError(f"a token cannot visit {self.top_k} experts of {self.top_groups} groups of {size}")
