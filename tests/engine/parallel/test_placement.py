"""Where experts go: every expert somewhere, hot ones several times, the load even."""

from __future__ import annotations

import random

import pytest
import torch

from penstock.engine.models.layers.experts import ExpertSlots
from penstock.engine.parallel.placement import imbalance, keep_in_place, moves, place, shard_loads, slots_per_shard
from penstock.errors import ConfigError

SHAPES = [(8, 2, 0), (8, 3, 0), (12, 4, 1), (128, 8, 2), (256, 32, 1), (5, 4, 0), (4, 4, 9), (60, 7, 3)]


def heavy_tailed(experts: int, seed: int) -> list[float]:
    chance = random.Random(seed)
    return [chance.paretovariate(1.1) for _ in range(experts)]


@pytest.mark.parametrize(("experts", "shards", "copies"), SHAPES)
def test_every_expert_is_somewhere_and_on_no_shard_twice(experts: int, shards: int, copies: int) -> None:
    slots = slots_per_shard(experts, shards, copies)
    for loads in ([1.0] * experts, heavy_tailed(experts, 1), [0.0] * experts, [0.0] * (experts - 1) + [9.0]):
        table = place(loads, shards, slots)
        assert [len(held) for held in table] == [slots] * shards
        assert {expert for held in table for expert in held} == set(range(experts))
        assert all(len(set(held)) == slots for held in table)
        assert sum(shard_loads(table, loads)) == pytest.approx(sum(loads))


def test_copies_of_hot_experts_even_the_load_out() -> None:
    for seed in range(5):
        loads = heavy_tailed(64, seed)
        plain = place([1.0] * 64, 8, 8)
        balanced = place(loads, 8, 8)
        copied = place(loads, 8, 10)
        assert imbalance(copied, loads) <= imbalance(balanced, loads) <= imbalance(plain, loads)
        assert imbalance(copied, loads) < 1.15
    one_hot = [1.0] * 16 + [100.0]
    spread = place(one_hot, 4, slots_per_shard(17, 4, 1))
    assert sum(16 in held for held in spread) == 4, "the hot one is on every shard"


def test_what_can_stay_stays_where_it_is() -> None:
    old = place(heavy_tailed(60, 1), 6, 12)
    loads = heavy_tailed(60, 2)
    new = place(loads, 6, 12)
    kept = keep_in_place(old, new)
    assert {frozenset(held) for held in kept} == {frozenset(held) for held in new}
    assert imbalance(kept, loads) == pytest.approx(imbalance(new, loads))
    for shard in range(6):
        changed = moves(old, kept, shard)
        assert len(changed) == len({*kept[shard]} - {*old[shard]})
        assert all(kept[shard][slot] == expert for slot, expert in changed)
    assert keep_in_place(old, old[::-1]) == old and not any(moves(old, old, shard) for shard in range(6))


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(ConfigError, match="9 experts do not fit"):
        place([1.0] * 9, 2, 4)


def test_tokens_take_the_copies_of_an_expert_in_turn() -> None:
    slots = ExpertSlots(((0, 1), (1, 2), (1, 3)), shard=1, experts=4, device=torch.device("cpu"))
    chosen = torch.tensor([[1, 0], [1, 2], [1, 3], [1, 0]])
    assert slots.of(chosen).tolist() == [[1, 0], [2, 3], [4, 5], [1, 0]]
    assert slots.loads.tolist() == [2, 4, 1, 1]
    assert slots.here(chosen).tolist() == [[2, 2], [0, 1], [2, 2], [2, 2]], "2: elsewhere"
    slots.put(((3, 1), (0, 2), (1, 0)))
    assert slots.of(torch.tensor([[0], [0], [3]])).tolist() == [[2], [5], [0]]
