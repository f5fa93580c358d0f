"""Sampling: each parameter does what its definition says, and noise depends on the request alone."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper

from penstock.engine.backends import cpu
from penstock.engine.backends.interface import Ops
from penstock.engine.backends.reference import filters
from penstock.engine.backends.reference.backend import ReferenceBackend
from penstock.engine.backends.reference.noise import gumbel, row_keys
from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.batch import Batch, Chunk
from penstock.engine.request import Request, SamplingParams
from penstock.engine.runner.rows import Flag, Rows
from penstock.engine.runner.sampler import SampleRequest, sample
from penstock.engine.sequence import Sequence

VOCAB = 1000
DEVICE = torch.device("cpu")


def draw(
    logits: torch.Tensor,
    params: list[SamplingParams],
    position: int = 7,
    output: list[int] | None = None,
    ops: Ops | None = None,
) -> tuple[list[int], Any]:
    """Sample each row of `logits` with its own parameters."""
    ops = ops or ReferenceOps()
    rows = Rows(len(params), 64, logits.shape[1], ReferenceBackend())
    chunks = []
    for index, p in enumerate(params):
        seq = Sequence(Request(f"r{index}", [1, 2, 3], p), 0.0, (0.0, index))
        seq.tokens += output or []
        seq.row, seq.pending = index, 1
        chunks.append(Chunk(seq, 0, 3, True))
    rows.update(Batch(chunks, 0, 3))
    keys = row_keys(rows.seeds, np.full(len(params), position))
    request = SampleRequest(
        chunks,
        torch.arange(len(params)),
        torch.from_numpy(keys),
        Flag(int(np.bitwise_or.reduce(rows.flags))),
        rows.flags,
    )
    tokens, logprobs = sample(logits.clone(), request, rows, ops)
    return tokens.tolist(), logprobs


def frequencies(logits: torch.Tensor, count: int, **params: Any) -> torch.Tensor:
    """How often each token is drawn over `count` seeds."""
    drawn: list[int] = []
    for start in range(0, count, 500):
        batch = [SamplingParams(seed=seed, **params) for seed in range(start, start + 500)]
        drawn += draw(logits.expand(500, -1), batch)[0]
    return torch.bincount(torch.tensor(drawn), minlength=logits.shape[-1]) / count


def chi_square_p(observed: torch.Tensor, expected: torch.Tensor, count: int) -> float:
    """Upper-tail probability by the Wilson-Hilferty approximation."""
    live = expected * count > 5
    statistic = float((((observed - expected) ** 2 / expected)[live] * count).sum())
    degrees = int(live.sum()) - 1
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.95])
def test_typical_sampling_keeps_what_the_reference_keeps(share: float) -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(4)) * 2
    logits[0, 3] = float("-inf")
    expected = TypicalLogitsWarper(share)(torch.zeros(1, 1, dtype=torch.long), logits.clone())[0]
    observed = frequencies(logits, 3000, typical_p=share)
    assert not observed[expected.isinf()].any()
    likely = expected.softmax(-1) > 0.01
    assert (observed[likely] > 0).all()
    mixed = [
        SamplingParams(seed=1, typical_p=share),
        SamplingParams(seed=2),
        SamplingParams(temperature=0.0, typical_p=share),
    ]
    plain = [SamplingParams(seed=1), SamplingParams(seed=2), SamplingParams(temperature=0.0)]
    assert draw(logits.expand(3, -1), mixed)[0][1:] == draw(logits.expand(3, -1), plain)[0][1:], "others as before"


def test_temperature_sampling_follows_the_softmax() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(0)) * 1.5
    observed = frequencies(logits, 20_000, temperature=0.8)
    assert chi_square_p(observed, (logits[0] / 0.8).softmax(-1), 20_000) > 1e-3
    assert chi_square_p(observed, (logits[0] / 1.0).softmax(-1), 20_000) < 1e-6, "the test must see a wrong temperature"


def test_positions_of_one_request_are_independent() -> None:
    logits = torch.zeros(1, 50)
    pairs = [draw(logits, [SamplingParams(seed=3)], position=position)[0][0] for position in range(2000)]
    counts = torch.bincount(torch.tensor(pairs), minlength=50) / 2000
    assert chi_square_p(counts, torch.full((50,), 1 / 50), 2000) > 1e-3
    repeats = sum(a == b for a, b in itertools.pairwise(pairs)) / 1999
    assert 0.005 < repeats < 0.045


@pytest.mark.parametrize("vocab", [1000, 3])
@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.4},
        {"top_p": 0.999},
        {"min_p": 0.2},
        {"top_k": 40, "top_p": 0.7},
        {"top_k": 900, "top_p": 0.99},
        {"top_p": 1e-6},
        {"top_k": 5, "min_p": 0.3},
    ],
)
def test_filters_keep_exactly_the_defined_set(params: dict[str, Any], vocab: int) -> None:
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(1)) * 0.3
    kept = {int(t) for t in kept_by_definition(logits[0], **params)}
    drawn = {
        token
        for start in range(0, 2000, 500)
        for token in draw(
            logits.expand(500, -1), [SamplingParams(seed=s, **params) for s in range(start, start + 500)]
        )[0]
    }
    assert drawn <= kept
    if len(kept) <= 10:
        assert drawn == kept


@pytest.mark.parametrize(
    "params",
    [{"top_k": 900, "top_p": 0.99}, {"top_k": 600, "top_p": 0.5}, {"top_k": 513}, {"top_p": 0.97}, {"top_p": 0.3},
     {"top_k": 40, "top_p": 0.7, "min_p": 0.01}, {"min_p": 0.3}],
)  # fmt: skip
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_the_kept_set_is_complete(params: dict[str, Any], spread: float) -> None:
    """Every token the definition keeps, also where more candidates are needed than are looked at first."""
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(2)) * spread
    full = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    limits = (torch.tensor([full[name]]) for name in ("top_k", "top_p", "min_p"))
    cut = filters.thresholds(logits, torch.ones(1), *limits)
    got = set(torch.isfinite(filters.drop_below(logits, torch.ones(1), cut)[0]).nonzero().flatten().tolist())
    expected = set(kept_by_definition(logits[0], **params))
    assert len(got ^ expected) <= 1, "sums of probabilities may round differently at the very border"


ORDERED = torch.tensor([0.5, 0.2, 0.1, 0.08, 0.07, 0.05]).log()


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        # Min-p first would leave 0.5 and 0.2, of which top-p then keeps 0.5 / 0.7 alone.
        ({"top_p": 0.6, "min_p": 0.3}, 2),
        # Top-p over the whole would keep four: 0.5 + 0.2 + 0.1 is less than 0.85; of the three of top-k it keeps two.
        ({"top_k": 3, "top_p": 0.85}, 2),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.19}, 3),
    ],
)
def test_filters_in_the_order_of_the_reference(params: dict[str, Any], kept: int) -> None:
    """Top-k, then top-p over what that leaves, then min-p, on every backend that runs here; as transformers does it."""
    warpers: list[Any] = [TopKLogitsWarper(params["top_k"])] if "top_k" in params else []
    warpers += [TopPLogitsWarper(params["top_p"])]
    warpers += [MinPLogitsWarper(params["min_p"])] if "min_p" in params else []
    scores = ORDERED.unsqueeze(0)
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.int64), scores)
    expected = torch.isfinite(scores[0]).tolist()
    assert sum(expected) == kept
    native = cpu.load(2)
    limits = [torch.tensor([params.get(name, off)]) for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))]
    for ops in (ReferenceOps(), *([native] if native is not None else [])):
        cut = ops.filter_thresholds(ORDERED.unsqueeze(0), torch.ones(1), *limits)
        assert (cut <= ORDERED + 1e-6).tolist() == expected


def kept_by_definition(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    order = logits.argsort(descending=True).tolist()
    p = logits.double().softmax(-1)
    if top_k:
        order = order[:top_k]
    total, mass, kept = float(sum(p[t] for t in order)), 0.0, []
    for token in order:
        if kept and mass >= top_p * total:
            break
        kept.append(token)
        mass += float(p[token])
    return [token for token in kept if p[token] >= min_p * p.max()]


def test_greedy_rows_are_untouched_by_random_neighbours() -> None:
    logits = torch.randn(3, VOCAB)
    params = [SamplingParams(temperature=0.0), SamplingParams(seed=1, top_p=0.9), SamplingParams(temperature=0.0)]
    tokens, _ = draw(logits, params)
    assert [tokens[0], tokens[2]] == logits.argmax(-1)[[0, 2]].tolist()


def test_a_seed_draws_the_same_in_any_batch() -> None:
    logits = torch.randn(1, VOCAB)
    mine = SamplingParams(seed=42, temperature=1.3, top_p=0.95)
    alone, _ = draw(logits, [mine])
    others = [SamplingParams(seed=seed, top_k=3) for seed in range(6)]
    crowd, _ = draw(torch.cat([torch.randn(6, VOCAB), logits]), [*others, mine])
    assert crowd[-1] == alone[0]


def test_bias_and_minimum_length() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 3.0
    greedy = {"temperature": 0.0}
    assert draw(logits, [SamplingParams(**greedy)])[0] == [5]
    assert draw(logits, [SamplingParams(**greedy, logit_bias={5: -100.0, 9: 2.0})])[0] == [9]
    assert draw(logits, [SamplingParams(**greedy, min_tokens=1, stop_token_ids=(5,))])[0] != [5]
    late = SamplingParams(**greedy, min_tokens=1, stop_token_ids=(5,))
    assert draw(logits, [late], output=[8])[0] == [5]


def test_penalties_follow_their_definitions() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 8], logits[0, 3], logits[0, 4] = 2.0, 1.5, 1.0
    zero = {"temperature": 0.0}
    # 8 was generated twice; 3 is in the prompt ([1, 2, 3]) only.
    assert draw(logits, [SamplingParams(**zero, presence_penalty=0.4)], output=[8, 8])[0] == [8]
    assert draw(logits, [SamplingParams(**zero, presence_penalty=0.6)], output=[8, 8])[0] == [3]
    assert draw(logits, [SamplingParams(**zero, frequency_penalty=0.3)], output=[8, 8])[0] == [3]
    assert draw(logits, [SamplingParams(**zero, repetition_penalty=3.0)], output=[8, 8])[0] == [4]


def test_logprobs_are_of_the_model_not_of_the_sampler() -> None:
    logits = torch.randn(2, VOCAB)
    params = [SamplingParams(temperature=0.0, logprobs=3, logit_bias={7: 100.0}), SamplingParams(temperature=0.0)]
    tokens, logprobs = draw(logits, params)
    assert tokens[0] == 7
    expected = logits.log_softmax(-1)
    first, second = logprobs.to_lists([3, None])
    assert second is None
    assert first.logprob == pytest.approx(float(expected[0, 7]), abs=1e-4)
    assert first.top_ids == expected[0].topk(3).indices.tolist()
    assert first.top_logprobs == pytest.approx(expected[0].topk(3).values.tolist(), abs=1e-4)


def test_noise_is_finite_and_gumbel() -> None:
    noise = gumbel(torch.from_numpy(row_keys(np.arange(64), np.arange(64))), 50_000)
    assert torch.isfinite(noise).all()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.005)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)


def test_native_kernels_draw_the_same_tokens() -> None:
    native = cpu.load(2)
    if native is None:
        pytest.skip(f"no native CPU kernels here: {cpu.status().detail}")
    logits = torch.randn(64, 5000) * 3
    params = [SamplingParams(seed=i, temperature=0.1 * (i % 12)) for i in range(64)]
    assert draw(logits, params, ops=native)[0] == draw(logits, params)[0]
