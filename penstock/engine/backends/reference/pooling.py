"""Entries that stand for several tokens each: softmaxes that go on from step to step.

Of a group that is not complete, what is kept is the running softmax of each dimension: maximum, sum of weights and
weighted sum, float32. What is kept is meant only where positions say so, so that a state that nobody wrote can be read.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import Entries, PoolInputs

EMPTY = float("-inf"), 0.0, 0.0
"""A softmax over nothing."""


def rotate_last(x: Tensor, table: Tensor, *, back: bool = False) -> Tensor:
    """The last dimensions of `x`, as many as the table has, rotated in pairs of neighbours. `back`: the other way."""
    rotary = table.shape[-1]
    wide = x.float()
    cos, sin = table[..., : rotary // 2], table[..., rotary // 2 :]
    sin = -sin if back else sin
    low, high = wide[..., -rotary::2], wide[..., 1 - rotary :: 2]
    turned = torch.stack((low * cos - high * sin, high * cos + low * sin), dim=-1).flatten(-2)
    return torch.cat((wide[..., :-rotary], turned), dim=-1).to(x.dtype)


def finished(pooled: Tensor, positions: Tensor, norm: Tensor, eps: float, cos_sin: Tensor) -> Tensor:
    """Entries as they are kept, of the means [..., dim] of their tokens. `positions`: of their first tokens."""
    normed = F.rms_norm(pooled, (pooled.shape[-1],), norm.float(), eps).to(norm.dtype)
    return rotate_last(normed, cos_sin[positions])


def entry_slots(tables: Tensor, entries: Tensor, rate: int, kept: Entries) -> Tensor:
    """Where `entries` of sequences lie, in the rows of all blocks. Both [..., n]."""
    last = (entries + 1) * rate - 1
    block = last // kept.block_size
    first = block * kept.block_size // rate  # the first entry that ends in this block
    return tables.gather(-1, block).long() * kept.rows.shape[1] + entries - first


def pool_singles(
    inputs: PoolInputs, positions: Tensor, running: Tensor, before: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of one token of each of several sequences: what its group's entry is if it completes it [N, dim], and the state
    behind it."""
    rate, (most, total, mean) = len(inputs.bias), running.unbind(1)
    first = (positions % rate == 0).unsqueeze(1)
    most, total, mean = (torch.where(first, nothing, x) for x, nothing in zip((most, total, mean), EMPTY, strict=True))
    gates = inputs.gates.float() + inputs.bias[positions % rate]
    highest = torch.maximum(most, gates)
    keep, weight = (most - highest).exp(), (gates - highest).exp()
    group = torch.stack((highest, total * keep + weight, mean * keep + weight * inputs.values.float()), 1)
    if before is None:
        return group[:, 2] / group[:, 1], group, None
    own, next_ = group.chunk(2, -1)[::-1]
    known = (positions >= rate).view(-1, 1, 1)
    empty = torch.tensor(EMPTY, device=own.device).view(1, 3, 1)
    pooled = _merged(torch.where(known, before, empty), own)
    complete = ((positions + 1) % rate == 0).view(-1, 1, 1)
    return pooled[:, 2] / pooled[:, 1], group, torch.where(complete, next_, before)


def pool_run(
    inputs: PoolInputs, start: int, running: Tensor, before: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of consecutive tokens of one sequence: the entries that they complete [n, dim], and the state behind them.
    `start`: position of the first token; `running` [3, width], `before` [3, dim]."""
    rate, width = inputs.bias.shape
    tokens, offset = len(inputs.values), start % rate
    groups, complete = -(-(offset + tokens) // rate), (offset + tokens) // rate
    places = torch.arange(offset, offset + tokens, device=running.device)
    gates = running.new_full((groups * rate, width), float("-inf"))
    gates[places] = inputs.gates.float() + inputs.bias[places % rate]
    values = running.new_zeros(groups * rate, width)
    values[places] = inputs.values.float()
    gates = gates.view(groups, rate, width)
    highest = gates.amax(1)
    weights = (gates - highest.unsqueeze(1)).exp()
    made = torch.stack((highest, weights.sum(1), (weights * values.view(groups, rate, width)).sum(1)), 1)
    if offset:
        made[0] = _merged(running.unsqueeze(0), made[:1])[0]
    if before is None:
        return made[:complete, 2] / made[:complete, 1], made[-1], None
    next_, own = made.chunk(2, -1)
    if start < rate:  # there is no group before the first one
        before = torch.tensor(EMPTY, device=own.device).view(3, 1).expand_as(before)
    befores = torch.cat((before.unsqueeze(0), next_[:-1]))
    pooled = _merged(befores[:complete], own[:complete])
    return pooled[:, 2] / pooled[:, 1], made[-1], next_[complete - 1] if complete else before


def _merged(one: Tensor, other: Tensor) -> Tensor:
    """Softmaxes [n, 3, dim] over two sets of tokens, of which the second is not empty, as those over both."""
    highest = torch.maximum(one[:, 0], other[:, 0])
    left, right = (one[:, 0] - highest).exp(), (other[:, 0] - highest).exp()
    sums = [one[:, part] * left + other[:, part] * right for part in (1, 2)]
    return torch.stack((highest, *sums), 1)
