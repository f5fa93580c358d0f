"""From logits to tokens, for all rows of a step at once.

Order: bias, penalties, minimum length, grammar and token rules, typical-p, temperature, top-k, top-p, min-p, then
Gumbel-max: the sample is the argmax of scaled logits plus noise. A step runs only the parts that some row of it needs.
Log-probabilities are of the model's own distribution, before any of this.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.engine.backends.interface import Ops
from penstock.engine.batch import Chunk
from penstock.engine.grammar.interface import PendingMasks
from penstock.engine.request import TokenLogprob
from penstock.engine.runner.rows import FLOATS, Flag, Rows


@dataclass(slots=True)
class SampleRequest:
    """The sampling side of a step, in the order of the logits' rows."""

    chunks: list[Chunk]
    """The chunk of each row; one that verifies draft tokens has a row behind every token."""
    rows: Tensor
    """int64 [S] on the device."""
    keys: Tensor
    """int64 [S]: noise keys."""
    flags: Flag
    """Union over the rows."""
    row_flags: np.ndarray
    masks: PendingMasks | None = None
    """Of the rows with a grammar, in their order."""
    ahead: np.ndarray | None = None
    """When some chunks verify draft tokens: how many of its chunk come before each row."""


@dataclass(slots=True)
class LogprobTensors:
    """Log-probabilities of the chosen tokens and of the `top` most likely ones."""

    chosen: Tensor
    top_ids: Tensor
    top: Tensor
    ranks: Tensor | None = None

    def to_lists(self, wanted: list[int | None]) -> list[TokenLogprob | None]:
        """One entry per row; None where none were asked for."""
        chosen, ids, top = self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist()
        ranks = [0] * len(chosen) if self.ranks is None else self.ranks.tolist()
        return [
            None if count is None else TokenLogprob(chosen[i], ids[i][:count], top[i][:count], ranks[i])
            for i, count in enumerate(wanted)
        ]


def logprobs_of(
    logits: Tensor, tokens: Tensor, count: int, *, one_by_one: bool = False, ranked: bool = False
) -> LogprobTensors:
    """Log-probabilities under `logits` [n, vocab] of `tokens` [n] and of the `count` most likely tokens.

    `one_by_one`: each row is summed alone, so that it does not matter how many there are. `ranked`: also the rank of
    each of `tokens`.
    """
    if one_by_one:
        norm = torch.cat([logits[i : i + 1].logsumexp(-1, keepdim=True) for i in range(len(logits))])
    else:
        norm = logits.logsumexp(-1, keepdim=True)
    top = logits.topk(count, dim=-1) if count else None
    own = logits.gather(1, tokens.unsqueeze(1))
    chosen = own - norm
    ranks = (logits > own).sum(-1) + 1 if ranked else None
    empty = tokens.new_zeros((len(tokens), 0))
    return LogprobTensors(
        chosen.squeeze(1),
        empty if top is None else top.indices,
        empty.float() if top is None else top.values - norm,
        ranks,
    )


def sample(logits: Tensor, request: SampleRequest, rows: Rows, ops: Ops) -> tuple[Tensor, LogprobTensors | None]:
    """Choose one token per row of float32 `logits` [S, vocab], which may be overwritten."""
    flags = request.flags
    edits = flags & (Flag.BIAS | Flag.PENALTY | Flag.MIN_TOKENS | Flag.GRAMMAR | Flag.TYPICAL)
    raw = logits.clone() if flags & Flag.LOGPROBS and edits else logits
    if flags & Flag.BIAS:
        _add_bias(logits, request)
    if flags & Flag.PENALTY:
        _penalize(logits, request, rows)
    if flags & Flag.MIN_TOKENS:
        _forbid_early_stops(logits, request)
    if flags & Flag.GRAMMAR:
        _follow_grammars(logits, request, rows, ops)
    if flags & Flag.TYPICAL:
        _keep_typical(logits, request, rows)
    tokens = _choose(logits, request, rows, ops)
    if flags & Flag.PENALTY and rows.output_counts is not None:
        _count(request, tokens, rows.output_counts)
    logprobs = None
    if flags & Flag.LOGPROBS:
        count = max(chunk.seq.params.logprobs or 0 for chunk in request.chunks)
        logprobs = logprobs_of(raw, tokens, count, one_by_one=rows.one_by_one)
    return tokens, logprobs


def _choose(logits: Tensor, request: SampleRequest, rows: Rows, ops: Ops) -> Tensor:
    if not request.flags & Flag.RANDOM:
        return ops.argmax(logits)
    values = rows.floats[request.rows]
    temperature = values[:, FLOATS.index("temperature")].contiguous()
    cut = None
    if request.flags & Flag.FILTER:
        top_p, min_p = (values[:, FLOATS.index(name)].contiguous() for name in ("top_p", "min_p"))
        filters = (logits, temperature, rows.top_k[request.rows], top_p, min_p)
        if rows.one_by_one:
            rows_alone = [[value[i : i + 1] for value in filters] for i in range(len(logits))]
            cut = torch.cat([ops.filter_thresholds(*row) for row in rows_alone])
        else:
            cut = ops.filter_thresholds(*filters)
    return ops.gumbel_argmax(logits, temperature, request.keys, cut)


def _add_bias(logits: Tensor, request: SampleRequest) -> None:
    at: list[int] = []
    ids: list[int] = []
    values: list[float] = []
    for index in np.flatnonzero(request.row_flags & Flag.BIAS):
        bias = request.chunks[index].seq.params.logit_bias
        at.extend([int(index)] * len(bias))
        ids.extend(bias)
        values.extend(bias.values())
    device = logits.device
    logits.index_put_(
        (torch.tensor(at, device=device), torch.tensor(ids, device=device)),
        torch.tensor(values, dtype=logits.dtype, device=device),
        accumulate=True,
    )


def _penalize(logits: Tensor, request: SampleRequest, rows: Rows) -> None:
    """Repetition (prompt and output), frequency and presence (output only), as their usual definitions say."""
    assert rows.output_counts is not None and rows.prompt_seen is not None
    at = torch.from_numpy(np.flatnonzero(request.row_flags & Flag.PENALTY)).to(logits.device)
    where = request.rows[at]
    counts, values = rows.output_counts[where], rows.floats[where]
    if request.ahead is not None:
        _count_drafts(counts, request)
    presence, frequency, repetition = (
        values[:, FLOATS.index(name)].unsqueeze(1)
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")
    )
    part = logits[at]
    generated = counts > 0
    repeated = generated | rows.prompt_seen[where]
    part = torch.where(repeated, torch.where(part > 0, part / repetition, part * repetition), part)
    part -= counts * frequency + generated * presence
    logits[at] = part


def _count_drafts(counts: Tensor, request: SampleRequest) -> None:
    """Behind a draft token, penalties count it as generated. `counts`: of the penalized rows."""
    assert request.ahead is not None
    at: list[int] = []
    ids: list[int] = []
    for place, index in enumerate(np.flatnonzero(request.row_flags & Flag.PENALTY)):
        before = request.chunks[index].drafts[: int(request.ahead[index])]
        at.extend([place] * len(before))
        ids.extend(before)
    if at:
        device = counts.device
        where = (torch.tensor(at, device=device), torch.tensor(ids, device=device))
        counts.index_put_(where, counts.new_ones(len(at)), accumulate=True)


def _count(request: SampleRequest, tokens: Tensor, counts: Tensor) -> None:
    """Count what was sampled; where draft tokens are verified, `Rows.count` does that once they are accepted."""
    rows = request.rows
    if request.ahead is not None:
        final = torch.tensor([index for index, chunk in enumerate(request.chunks) if not chunk.drafts])
        final = final.to(tokens.device, torch.int64)
        rows, tokens = rows[final], tokens[final]
    counts.index_put_((rows, tokens), counts.new_ones(len(tokens)), accumulate=True)


def _forbid_early_stops(logits: Tensor, request: SampleRequest) -> None:
    at: list[int] = []
    ids: list[int] = []
    for index in np.flatnonzero(request.row_flags & Flag.MIN_TOKENS):
        # The masks of a grammar already say which stop tokens are possible.
        if not request.row_flags[index] & Flag.GRAMMAR:
            ahead = 0 if request.ahead is None else int(request.ahead[index])
            barred = request.chunks[index].seq.barred_stops(ahead)
            at.extend([int(index)] * len(barred))
            ids.extend(barred)
    if at:
        logits[torch.tensor(at, device=logits.device), torch.tensor(ids, device=logits.device)] = float("-inf")


def _follow_grammars(logits: Tensor, request: SampleRequest, rows: Rows, ops: Ops) -> None:
    """Leave the tokens that grammars allow. The masks were computed while the device ran the step."""
    assert request.masks is not None, "rows with a grammar come with masks"
    masks = request.masks.wait()
    at, bits = rows.mask_staging.upload([np.flatnonzero(request.row_flags & Flag.GRAMMAR), masks.reshape(-1)])
    ops.mask_logits(logits, at, bits.view(masks.shape))


def _keep_typical(logits: Tensor, request: SampleRequest, rows: Rows) -> None:
    """Leave the tokens whose information is nearest to the entropy of the distribution, until they hold typical_p of
    the mass."""
    at = torch.from_numpy(np.flatnonzero(request.row_flags & Flag.TYPICAL)).to(logits.device)
    share = rows.floats[request.rows[at], FLOATS.index("typical_p")].unsqueeze(1)
    part = logits[at]
    if rows.one_by_one:
        logits[at] = torch.cat([_typical(part[i : i + 1], share[i : i + 1]) for i in range(len(part))])
    else:
        logits[at] = _typical(part, share)


def _typical(logits: Tensor, share: Tensor) -> Tensor:
    logprobs = logits.log_softmax(-1)
    mass = logprobs.exp()
    # Where a token is impossible, its share of the entropy is 0 and its distance infinite.
    entropy = -(mass * logprobs.clamp(min=-1e30)).sum(-1, keepdim=True)
    order = (-logprobs - entropy).abs().argsort(-1)
    ordered = mass.gather(1, order)
    dropped = ordered.cumsum(-1) - ordered >= share
    dropped[:, 0] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), float("-inf"))
