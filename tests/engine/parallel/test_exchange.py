"""Rows from every member of a group to every other: any number of them, also none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from penstock.engine.backends.select import pick_backend
from penstock.engine.config import LOCAL
from penstock.engine.parallel.groups import Group, Groups
from penstock.engine.parallel.layout import Place
from penstock.engine.parallel.rendezvous import Rendezvous


def rows_between(sender: int, receiver: int) -> int:
    return (sender * 5 + receiver * 3) % 4 if sender != 2 else 0


def shuffle(group: Group) -> None:
    members = range(group.size)
    counts = [rows_between(group.rank, other) for other in members]
    x = torch.cat([torch.full((count, 3), 10.0 * group.rank + other) for other, count in enumerate(counts)])
    sizes = group.exchange_counts(torch.tensor(counts))
    assert sizes == [rows_between(other, group.rank) for other in members]
    came = group.exchange(x, counts, sizes)
    expected = [torch.full((size, 3), 10.0 * other + group.rank) for other, size in enumerate(sizes)]
    assert torch.equal(came, torch.cat(expected))
    assert torch.equal(group.exchange(came, sizes, counts), x), "and back"


@pytest.mark.parametrize("size", [2, 4])
def test_every_row_arrives_in_order(tmp_path: Path, size: int) -> None:
    backend = pick_backend(torch.device("cpu"), 1)

    rendezvous = Rendezvous(tmp_path, 20.0, (LOCAL,) * size, None)

    def member(rank: int) -> None:
        group = Groups(Place(rank, size, 1), rendezvous, backend).tensor
        assert group is not None
        shuffle(group)

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(member, range(size)))
