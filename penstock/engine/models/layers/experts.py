"""A mixture of experts: a router chooses a few experts for each token, and an expert sees only its tokens.

Here experts are ordinary linears, quantized ones too, computed one after another: right where a launch costs nothing
(CPU). `backends.cuda.experts` computes all of them at once.

With several processes each may hold some of the experts (`ExpertSlots`). `apply` then computes the part of the sum
whose experts are here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import ActivationOps, Ops
from penstock.engine.models.layers.feed_forward import FeedForward, GatedMlp, gated
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.layers.visit_norm import VisitNorm
from penstock.engine.models.moe_config import SMALL_TOTAL, GroupScore, LayerTable, Scoring


@dataclass(slots=True)
class StepTokens:
    """The ids of the tokens that are being computed, for what looks them up."""

    ids: Tensor | None = None

    def of(self, count: int) -> Tensor:
        if self.ids is None or len(self.ids) != count:
            raise RuntimeError("token ids are looked up, and nobody has said which the tokens of this step are")
        return self.ids


@dataclass(frozen=True, slots=True)
class Router:
    """Scores every expert for every token and keeps the best. The fields are those of `MoeConfig`."""

    linear: Linear
    top_k: int
    normalize: bool
    scoring: Scoring = "softmax"
    bias: Tensor | None = None
    """The correction of the scores by which experts are chosen: float32 [experts]."""
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "best"
    scale: float = 1.0
    weight_inputs: bool = False
    logit_softcap: float = 0.0
    logit_scale: float = 1.0
    total_eps: float = SMALL_TOTAL
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
    """See `Ops.sigmoid`."""
    sqrt_softplus: Callable[[Tensor], Tensor] = lambda x: F.softplus(x).sqrt()
    table: Tensor | None = None
    """int64 [vocab, top_k]: the experts of each token, where scores only weigh them."""
    tokens: StepTokens = field(default_factory=StepTokens)
    gains: Tensor | None = None
    """Factors of the weights, after all others: float32 [experts]."""
    outside: float = -math.inf
    """What experts outside of the best groups are chosen by."""

    def gained(self, weights: Tensor, experts: Tensor) -> Tensor:
        """`weights` times the factors of their experts."""
        return weights if self.gains is None else weights * self.gains[experts.long()]

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights float32 [T, top_k] and experts int64 [T, top_k], the best first."""
        logits = self.linear(x).float()
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap:
            logits = self.logit_softcap * (logits / self.logit_softcap).tanh()
        scores = self._scores(logits)
        if self.table is not None:
            experts = self.table[self.tokens.of(len(x))]
            weights = scores.gather(1, experts)
        elif self.bias is None and self.groups == 1 and self.scoring == "softmax":
            weights, experts = scores.topk(self.top_k, dim=-1)
        elif self.bias is None and self.groups == 1:
            experts = logits.topk(self.top_k, dim=-1).indices  # sigmoids of large logits are all one
            weights = scores.gather(1, experts)
        else:
            choice = scores if self.bias is None else scores + self.bias
            if self.groups > 1:
                others = ~self._in_best_groups(choice)
                if self.outside == -math.inf:
                    scores = scores.masked_fill(others, 0.0)
                choice = choice.masked_fill(others, self.outside)
            experts = choice.topk(self.top_k, dim=-1).indices
            weights = scores.gather(1, experts)
        if self.normalize:
            total = _sum(weights).unsqueeze(-1)
            weights = weights / (total if self.scoring == "softmax" else total + self.total_eps)
        return self.gained(weights if self.scale == 1.0 else weights * self.scale, experts), experts

    def _scores(self, logits: Tensor) -> Tensor:
        if self.scoring == "sqrt_softplus":
            return self.sqrt_softplus(logits)
        return self.sigmoid(logits) if self.scoring == "sigmoid" else logits.softmax(-1)

    def _in_best_groups(self, choice: Tensor) -> Tensor:
        """bool [T, experts]."""
        grouped = choice.view(len(choice), self.groups, -1)
        best = grouped.topk(2, dim=-1).values.sum(-1) if self.group_score == "best_two" else grouped.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(self.top_groups, dim=-1).indices, True)
        return kept.unsqueeze(-1).expand_as(grouped).flatten(1)


class ExpertSlots:
    """Where the experts of a layer are, and how many tokens chose each of them.

    Slots are numbered through all shards, shard by shard. Tokens take the copies of an expert in turn, by their place
    in the step: a choice that every process makes alike, and that never depends on what was computed before.
    """

    def __init__(self, table: LayerTable, shard: int, experts: int, device: torch.device) -> None:
        self.shard = shard
        self.size = len(table[0])
        self.loads = torch.zeros(experts, dtype=torch.int64, device=device)
        """Visits of each expert since the start, of the tokens that this process routed."""
        self.held = torch.zeros(self.size + 1, dtype=torch.int64, device=device)
        """The expert in each slot of this shard; one more for choices that are elsewhere."""
        self._copies = torch.ones(experts, dtype=torch.int64, device=device)
        self._places = torch.zeros(experts, len(table), dtype=torch.int64, device=device)
        self.put(table)

    def put(self, table: LayerTable) -> None:
        """Experts have moved. In place, so that recorded steps see it."""
        self.table = table
        self.held[: self.size].copy_(torch.tensor(table[self.shard]))
        places: list[list[int]] = [[] for _ in range(len(self.loads))]
        for shard, held in enumerate(table):
            for slot, expert in enumerate(held):
                places[expert].append(shard * self.size + slot)
        width = self._places.shape[1]
        self._copies.copy_(torch.tensor([len(slots) for slots in places]))
        self._places.copy_(torch.tensor([slots + [0] * (width - len(slots)) for slots in places]))

    def of(self, chosen: Tensor) -> Tensor:
        """The slot for each choice [T, top_k] of an expert, int64; counts the visits."""
        chosen = chosen.long()
        self.loads.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
        token = torch.arange(len(chosen), device=chosen.device).unsqueeze(1)
        return self._places[chosen, token % self._copies[chosen]]

    def here(self, chosen: Tensor) -> Tensor:
        """As `of`, counted from this shard's first slot; one past its last for those elsewhere."""
        return self.on(self.shard, self.of(chosen))

    def on(self, shard: Tensor | int, slots: Tensor) -> Tensor:
        """Slots as `shard` counts them; one past its last for those elsewhere."""
        local = slots - shard * self.size
        return torch.where((local < 0) | (local >= self.size), self.size, local)


@dataclass(frozen=True, slots=True)
class ExpertSource:
    """A layer's experts in the checkpoint, to be read again when they move."""

    make: Callable[[int], GatedMlp]
    """One expert, as the others were made. On the thread that runs steps, since it may use their kernels."""
    touch: Callable[[int], None]
    """Read its tensors and forget them: what comes from a disk is then in memory. On any thread."""


class Additions(Protocol):
    """What is added to experts' linears: the adapters of the tokens that visit them.

    `x` is what the linears read, a row for each visit, and `base` what they make of such rows; it may be called again
    with others. `pairs` [rows] says of which pair of token and choice (`t * top_k + i`), None: row by row of all pairs.
    Returns what base(x) is with adapters.
    """

    def gate_up(self, x: Tensor, base: Callable[[Tensor], Tensor], pairs: Tensor | None = None) -> Tensor: ...

    def down(
        self,
        x: Tensor,
        base: Callable[[Tensor], Tensor],
        pairs: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """`weights`: float32, by which `base` multiplies outputs."""
        ...


class Experts(FeedForward, Protocol):
    """A feed-forward of experts, all or some of which this process holds."""

    @property
    def router(self) -> Router: ...

    @property
    def slots(self) -> ExpertSlots | None:
        """None when all experts are here, in order."""
        ...

    @property
    def source(self) -> ExpertSource: ...

    def forward(self, x: Any, inputs: Tensor | None = None) -> Tensor:
        """`inputs`: what the experts read, where it is not what the router does."""
        ...

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights float32 and experts [T, top_k]."""
        ...

    def apply(self, x: Tensor, weights: Tensor, chosen: Tensor, added: Additions | None = None) -> Tensor:
        """The weighted sum over each token's experts that are here. `chosen` [T, any]: slots of this process, counted
        from 0; one past the last is elsewhere and adds nothing. `added`: to the linears of its visits."""
        ...

    def replace(self, slot: int, expert: GatedMlp) -> None:
        """Hold another expert from now on."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """Experts one by one, each over its own tokens."""

    ops: Ops
    router: Router
    experts: list[GatedMlp]
    source: ExpertSource
    slots: ExpertSlots | None = None
    visit_norm: VisitNorm | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.router.linear,)

    @property
    def weight_bytes(self) -> int:
        return self.router.linear.weight_bytes + sum(expert.weight_bytes for expert in self.experts)

    def forward(self, x: Tensor, inputs: Tensor | None = None) -> Tensor:
        weights, chosen = self.router(x)
        chosen = chosen if self.slots is None else self.slots.here(chosen)
        return self.apply(x if inputs is None else inputs, weights, chosen)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.router(x)

    def apply(self, x: Tensor, weights: Tensor, chosen: Tensor, added: Additions | None = None) -> Tensor:
        top_k = chosen.shape[1]
        # Pairs of token and expert, sorted by expert: one gather before and one after, none per expert.
        order = chosen.flatten().argsort(stable=True)
        *counts, elsewhere = torch.bincount(chosen.flatten(), minlength=len(self.experts) + 1).tolist()
        order = order[: len(order) - elsewhere]
        inputs = x[order // top_k]
        if self.router.weight_inputs:
            inputs = (inputs * weights.flatten()[order].unsqueeze(-1)).to(x.dtype)
        runs = torch.split(inputs, counts)
        outputs = x.new_zeros(len(x) * top_k, x.shape[1])
        if len(order) and added is not None:
            outputs[order] = self._with_additions(inputs, counts, order, added)
        elif len(order):
            outputs[order] = torch.cat(
                [expert.forward(run) for expert, run in zip(self.experts, runs, strict=True) if len(run)]
            )
        if self.visit_norm is not None:
            outputs = self.visit_norm(outputs, top_k)
        by_token = outputs.view(len(x), top_k, x.shape[1])
        return _sum(by_token if self.router.weight_inputs else by_token * weights.to(x.dtype).unsqueeze(-1))

    def _with_additions(self, inputs: Tensor, counts: list[int], pairs: Tensor, added: Additions) -> Tensor:
        """What the experts make of `inputs`, which are in their order."""
        first = self.experts[0]
        visited = [(expert, count) for expert, count in zip(self.experts, counts, strict=True) if count]
        sizes = [count for _, count in visited]

        def gate_up(rows: Tensor) -> Tensor:
            runs = zip(visited, torch.split(rows, sizes), strict=True)
            return torch.cat([expert.gate_up(run) for (expert, _), run in runs])

        def down(rows: Tensor) -> Tensor:
            runs = zip(visited, torch.split(rows, sizes), strict=True)
            return torch.cat([expert.down(run) for (expert, _), run in runs])

        inner = gated(first.ops, first.activation, added.gate_up(inputs, gate_up, pairs))
        return added.down(inner, down, pairs)

    def replace(self, slot: int, expert: GatedMlp) -> None:
        self.experts[slot] = expert


@dataclass(frozen=True, slots=True)
class SharedAndRouted:
    """Experts of which each token visits a few, and one that every token visits."""

    routed: FeedForward
    """`Experts`, perhaps spread over processes."""
    shared: GatedMlp
    gate: Linear | None = None
    """One number per token, whose sigmoid the shared expert's output is multiplied by."""
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
    """See `Ops.sigmoid`."""

    @property
    def ops(self) -> ActivationOps:
        return self.routed.ops

    @property
    def feed_forward(self) -> FeedForward:
        """Where those who look for experts go on."""
        return self.routed

    @property
    def linears(self) -> tuple[Linear, ...]:
        gate = () if self.gate is None else (self.gate,)
        return *self.routed.linears, *self.shared.linears, *gate

    @property
    def weight_bytes(self) -> int:
        gate = 0 if self.gate is None else self.gate.weight_bytes
        return self.routed.weight_bytes + self.shared.weight_bytes + gate

    def forward(self, x: Tensor) -> Tensor:
        # The shared expert first: experts may write over their input.
        shared = self.shared.forward(x)
        if self.gate is not None:
            shared = shared * self.sigmoid(self.gate(x))
        return self.routed.forward(x) + shared


@dataclass(frozen=True, slots=True)
class ApartExperts:
    """Experts of which each token visits a few, and a feed-forward that every token visits, each with norms of its own:
    both read the residual stream itself, and what is added are their normalized outputs."""

    routed: Any
    """`Experts`, perhaps spread over processes."""
    shared: Any
    """A `GatedMlp`."""
    norms: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    """Before the shared one, before the router, before the experts; behind the shared one, behind the experts."""
    eps: float
    dtype: torch.dtype
    """Of activations."""
    over_ranks: Callable[[Tensor], Tensor] | None = None
    """Where other ranks have parts of both: what sums them up."""

    @property
    def ops(self) -> ActivationOps:
        ops: ActivationOps = self.routed.ops
        return ops

    @property
    def feed_forward(self) -> FeedForward:
        """Where those who look for experts go on."""
        routed: FeedForward = self.routed
        return routed

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.routed.linears, *self.shared.linears

    @property
    def weight_bytes(self) -> int:
        size: int = self.routed.weight_bytes + self.shared.weight_bytes
        return size

    def forward(self, x: Tensor) -> Tensor:
        """`x`: the residual stream, which stays as it is."""
        ops, eps = self.ops, self.eps
        before, of_router, of_experts, behind, behind_experts = self.norms
        shared = self.shared.forward(self.shared.ops.rms_norm(x, before, eps, self.dtype))
        scored = ops.rms_norm(x, of_router, eps, self.dtype)
        routed = self.routed.forward(scored, ops.rms_norm(x, of_experts, eps, self.dtype))
        if self.over_ranks is not None:
            shared, routed = self.over_ranks(torch.cat((shared, routed))).chunk(2)
        normed: Tensor = ops.rms_norm(shared, behind, eps)
        return normed.add_(ops.rms_norm(routed, behind_experts, eps))


@dataclass(frozen=True, slots=True)
class NarrowExperts:
    """Experts that read and give fewer numbers than a token has: one matrix before all of them, one behind their sum.
    The router reads the token itself."""

    routed: Any
    """`Experts`, perhaps spread over processes."""
    into: Linear
    out: Linear
    norm: Tensor | None = None
    """Gains of a norm behind the first matrix."""
    eps: float = 0.0

    @property
    def ops(self) -> ActivationOps:
        ops: ActivationOps = self.routed.ops
        return ops

    @property
    def feed_forward(self) -> FeedForward:
        """Where those who look for experts go on."""
        routed: FeedForward = self.routed
        return routed

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.routed.linears, self.into, self.out

    @property
    def weight_bytes(self) -> int:
        size: int = self.routed.weight_bytes
        return size + self.into.weight_bytes + self.out.weight_bytes

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.into(x)
        if self.norm is not None:
            inputs = self.ops.rms_norm(inputs, self.norm, self.eps)
        return self.out(self.routed.forward(x, inputs))


def _sum(x: Tensor) -> Tensor:
    """Over the second axis, one after another: the order of `Tensor.sum` depends on how many rows there are."""
    return reduce(torch.add, x.unbind(1))


def held(table: LayerTable | None, shard: int, experts: int) -> Sequence[int]:
    """The experts that a process holds, by slot."""
    return range(experts) if table is None else table[shard]
