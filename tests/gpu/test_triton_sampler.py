"""Tokens chosen on the device: argmax, seeded draws and filters against their definitions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gpu_harness import (
    DEVICE,
    MODE,
    QUICK,
    Row,
    bandwidth,
    check_equal,
    integers,
    poisoned_outputs,
    rand,
    rng,
    time_us,
)
from torch import Tensor

from penstock.engine.backends.cuda.kernels import filters
from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.reference.noise import gumbel

ops = TritonOps(DEVICE)
BF16 = torch.bfloat16
VOCABS = [5, 3000] if QUICK else [5, 3000, 49152, 128256, rng.randrange(2, 200000)]


def row_keys(count: int) -> Tensor:
    return integers([rng.getrandbits(64) - 2**63 for _ in range(count)], torch.int64)


def test_argmax_takes_the_first_of_equals() -> None:
    for vocab in VOCABS:
        for dtype in (torch.float32, BF16):
            logits = rand(7, vocab, dtype=dtype, scale=3)
            logits[1] = logits[1].round()
            logits[2] = -1.5
            logits[3, vocab - 1] = 100.0
            logits[4] = float("-inf")
            with poisoned_outputs():
                got = ops.argmax(logits)
            if MODE == "compile":
                continue
            want = torch.tensor([int((row == row.max()).nonzero()[0]) for row in logits.cpu()])
            check_equal(f"argmax {vocab} {dtype}", got, want)


def test_draws_follow_the_definition_of_the_noise() -> None:
    for vocab in VOCABS:
        for dtype in (torch.float32, BF16):
            count = 4 if QUICK else 40
            logits = rand(count, vocab, dtype=dtype, scale=2)
            temperatures = rand(count).abs() + 0.2
            temperatures[1] = 0.0
            keys = row_keys(count)
            with poisoned_outputs():
                got = ops.gumbel_argmax(logits, temperatures, keys)
            if MODE == "compile":
                continue
            scores = logits.double() / torch.where(temperatures > 0, temperatures, 1.0).double()[:, None]
            noise = gumbel(keys.cpu(), vocab).double().to(DEVICE)
            scores += noise * (temperatures > 0)[:, None]
            chosen = scores.gather(1, got[:, None]).squeeze(1)
            gap = float((scores.amax(1) - chosen).max())
            assert gap < 1e-4, f"vocab {vocab} {dtype}: the chosen token scores {gap} less than the best"


def test_noise_tails_are_those_of_the_definition() -> None:
    """Flat logits choose by noise alone, which is where a careless logarithm would show."""
    vocab = 20000 if QUICK else 131072
    count = 4 if QUICK else 64
    keys = row_keys(count)
    got = ops.gumbel_argmax(torch.zeros(count, vocab, device=DEVICE), torch.ones(count, device=DEVICE), keys)
    if MODE == "compile":
        return
    noise = gumbel(keys.cpu(), vocab).double()
    gap = noise.amax(1) - noise.gather(1, got.cpu()[:, None]).squeeze(1)
    assert float(gap.max()) < 1e-4, f"largest gap {float(gap.max())}"


def test_draws_do_not_depend_on_the_batch() -> None:
    vocab = 3000
    logits, keys = rand(6, vocab, scale=2), row_keys(6)
    temperatures = torch.full((6,), 0.8, device=DEVICE)
    together = ops.gumbel_argmax(logits, temperatures, keys)
    alone = [ops.gumbel_argmax(logits[i : i + 1], temperatures[i : i + 1], keys[i : i + 1]) for i in range(6)]
    check_equal("alone", torch.cat(alone), together)


def test_draws_follow_the_distribution() -> None:
    if QUICK or MODE == "compile":
        return
    logits = rand(1, 50, scale=1.5)
    count = 200_000
    keys = torch.randint(-(2**62), 2**62, (count,), device=DEVICE)
    drawn = ops.gumbel_argmax(logits.expand(count, 50).contiguous(), torch.full((count,), 0.7, device=DEVICE), keys)
    got = torch.bincount(drawn, minlength=50).double() / count
    want = (logits[0].double() / 0.7).softmax(-1)
    assert float((got - want).abs().max()) < 5e-3


def kept64(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, float]:
    """Which tokens the sort-based definition keeps, and how near a mass comes to the limit."""
    scaled = row.float() / torch.tensor(temperature, dtype=torch.float32)
    order = scaled.sort(descending=True).values.double()
    mass = (order - order[0]).exp()
    limit = top_k if top_k > 0 else len(order)
    mass[limit:] = 0
    before = mass.cumsum(0) - mass
    index = torch.arange(len(order))
    inside = index < limit
    margin = 1.0
    if top_p < 1.0:
        goal = top_p * mass.sum()
        margin = float((before - goal).abs().min() / mass.sum())
        inside &= before < goal
    inside[0] = True
    cut = order[int(inside.sum()) - 1]
    kept = scaled.double() >= cut
    if min_p > 0:
        floor = order[0] + torch.log(torch.tensor(min_p, dtype=torch.float64))
        margin = min(margin, float((scaled.double() - floor).abs().min()))
        kept &= scaled.double() >= floor
    return kept, margin


def test_filters_without_room_for_candidates() -> None:
    """The search of whole rows, for those with too many tokens above their floor."""
    capacity, filters._CAPACITY = filters._CAPACITY, 16
    try:
        test_filters_keep_what_a_sort_would()
    finally:
        filters._CAPACITY = capacity


def test_filters_keep_what_a_sort_would() -> None:
    for vocab in VOCABS[:2] if QUICK else VOCABS:
        for dtype in (torch.float32, BF16):
            cases = [
                (1, 1.0, 0.0),
                (50, 1.0, 0.0),
                (0, 0.9, 0.0),
                (0, 0.01, 0.0),
                (40, 0.8, 0.0),
                (0, 1.0, 0.05),
                (100, 0.95, 0.01),
                (0, 0.6, 0.3),
                (10**6, 0.5, 0.0),
                (0, 1.0, 0.0),
            ]
            rows = len(cases)
            logits = rand(rows, vocab, dtype=dtype, scale=rng.choice([0.5, 3, 20]))
            logits[1, :: max(1, vocab // 100)] = logits[1].max()
            logits[3, 0] = float("-inf")
            temperatures = (rand(rows).abs() + 0.3).cpu()
            top_k = integers([min(c[0], 2**31 - 1) for c in cases], torch.int64)
            top_p = torch.tensor([c[1] for c in cases], device=DEVICE)
            min_p = torch.tensor([c[2] for c in cases], device=DEVICE)
            with poisoned_outputs():
                got = ops.filter_thresholds(logits, temperatures.to(DEVICE), top_k, top_p, min_p)
                drawn = ops.gumbel_argmax(logits, temperatures.to(DEVICE), row_keys(rows), got)
            if MODE == "compile":
                continue
            for i, (k, p, floor) in enumerate(cases):
                kept, margin = kept64(logits[i].cpu(), float(temperatures[i]), k, p, floor)
                scaled = logits[i].cpu().float() / temperatures[i]
                mine = scaled >= got[i].cpu()
                if margin > 1e-5:
                    assert torch.equal(mine, kept), (
                        f"vocab {vocab} {dtype} k={k} p={p} min_p={floor}: kept {int(mine.sum())}, "
                        f"the definition keeps {int(kept.sum())}"
                    )
                assert bool(mine[int(drawn[i])]), f"case {i}: drew a token that was filtered out"


def bench_sampler() -> Iterator[Row]:
    vocab = 128256
    for count in (1, 64, 256):
        for dtype, label in ((BF16, "bf16"), (torch.float32, "float32")):
            sets = [rand(count, vocab, dtype=dtype, scale=3) for _ in range(2 if count > 1 else 8)]
            size = count * vocab * dtype.itemsize
            temperatures, keys = torch.full((count,), 0.6, device=DEVICE), row_keys(count)
            yield bandwidth(f"argmax {count}x{vocab} {label}", time_us([lambda x=x: ops.argmax(x) for x in sets]), size)
            us = time_us([lambda x=x, t=temperatures, k=keys: ops.gumbel_argmax(x, t, k) for x in sets])
            yield bandwidth(f"gumbel_argmax {count}x{vocab} {label}", us, size)
            top_k = torch.full((count,), 50, dtype=torch.int64, device=DEVICE)
            top_p, min_p = torch.full((count,), 0.9, device=DEVICE), torch.zeros(count, device=DEVICE)
            us = time_us(
                [
                    lambda x=x, t=temperatures, k=top_k, p=top_p, m=min_p: ops.filter_thresholds(x, t, k, p, m)
                    for x in sets
                ]
            )
            yield bandwidth(f"filter_thresholds k=50 p=0.9 {count}x{vocab} {label}", us, size)
