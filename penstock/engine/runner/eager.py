"""The executor that launches every operation of a step from Python; others fall back on it.

It runs any step on any backend: pack, upload, forward pass, sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock.engine.backends.interface import Ints
from penstock.engine.batch import Batch
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.linear import Linear
from penstock.engine.runner.executor import Executor
from penstock.engine.runner.inputs import Packed, StepInputs, chunk_targets
from penstock.engine.runner.resources import RunnerResources
from penstock.engine.runner.rows import DRAWN, Flag
from penstock.engine.runner.sampler import LogprobTensors, SampleRequest, logprobs_of, sample
from penstock.engine.runner.step import PendingStep

_SCORED_AT_ONCE = 128
"""Prompt positions whose logits exist at the same time; bounds the memory of prompt log-probabilities."""


class EagerExecutor(Executor):
    """See `Executor`. `deferred`: steps sample when they are waited for, because they go through a pipeline."""

    def __init__(self, resources: RunnerResources, *, deferred: bool = False) -> None:
        self._deferred = deferred
        self._backend = resources.backend
        self._decoder = resources.decoder
        self._kv = resources.kv
        self._rows = resources.rows
        self._inputs = resources.inputs
        self._adapters = resources.adapters
        self._scores_prompts = resources.scores_prompts

    @torch.inference_mode()
    def run(self, batch: Batch) -> PendingStep:
        return self._launch(batch, self._inputs.pack(batch), self._begin_adapters(batch) or self._decoder)

    def _begin_adapters(self, batch: Batch) -> Decoder | None:
        """The decoder with the adapters of a batch; None when none of its sequences uses one."""
        return None if self._adapters is None else self._adapters.begin(batch)

    def _launch(self, batch: Batch, packed: Packed, decoder: Decoder) -> PendingStep:
        step = PendingStep(batch, self._rows)
        inputs = self._inputs.upload(batch, packed)
        begun = decoder.begin(inputs.token_ids, inputs.attention, self._kv)
        step.sampling = partial(self._finish, step, inputs, begun, self._head_slots(decoder, packed.sample_at))
        if not self._deferred:
            step.finish()
        return step

    def _head_slots(self, decoder: Decoder, at: Ints) -> np.ndarray | None:
        """The adapters of the tokens `at` of the step that has begun, where the decoder adds them to logits."""
        adapters = self._adapters
        return adapters.slots[at] if adapters is not None and adapters.on_head(decoder) else None

    def _head(self, slots: np.ndarray | None) -> Linear:
        """The head for rows with these adapters."""
        adapters = self._adapters
        if slots is None or adapters is None or adapters.further is None or not len(slots) or slots.max() < 0:
            return self._decoder.head
        return adapters.head(slots)

    @torch.inference_mode()
    def _finish(
        self, step: PendingStep, inputs: StepInputs, take: Callable[[], Tensor], slots: np.ndarray | None = None
    ) -> None:
        """`slots`: see `_head_slots`."""
        hidden = take()
        self._score_prompts(step.batch, hidden, slots is not None)
        if inputs.sampling is not None:
            self._sample(step, self._head(slots)(hidden[inputs.sample_at]), inputs.sampling)

    def _sample(self, step: PendingStep, logits: Tensor, request: SampleRequest) -> None:
        ops = self._decoder.ops
        if request.flags & ~(DRAWN | Flag.FILTER) or not ops.samples_any_dtype:
            logits = logits.float()
            if logits.shape[1] < self._rows.vocab_size:  # no row has an adapter with tokens of its own
                more = self._rows.vocab_size - logits.shape[1]
                logits = torch.nn.functional.pad(logits, (0, more), value=float("-inf"))
        tokens, logprobs = sample(logits, request, self._rows, ops)
        if request.ahead is None:
            self._rows.last_tokens[request.rows] = tokens
        else:  # of a chunk with draft tokens, the last token's sample stays
            last = torch.from_numpy(np.flatnonzero(np.append(request.ahead[1:] == 0, True))).to(tokens.device)
            self._rows.last_tokens[request.rows[last]] = tokens[last]
        step.chunks = request.chunks
        self._send_to_host(step, tokens, logprobs)

    def _send_to_host(self, step: PendingStep, tokens: Tensor, logprobs: LogprobTensors | None) -> None:
        """Queue the copy of a step's results behind it; `PendingStep.wait` then needs only the event."""
        if logprobs is None:
            (step.tokens,), step.event = self._backend.to_host(tokens)
            return
        (step.tokens, chosen, top_ids, top), step.event = self._backend.to_host(
            tokens, logprobs.chosen, logprobs.top_ids, logprobs.top
        )
        step.logprobs = LogprobTensors(chosen, top_ids, top)

    def _score_prompts(self, batch: Batch, hidden: Tensor, adapted: bool = False) -> None:
        """Log-probabilities of prompt tokens, for the sequences that asked for them. `adapted`: with adapters on the
        head."""
        for index, begin, wanted in chunk_targets(batch) if self._scores_prompts else ():
            seq, slot = batch.chunks[index].seq, batch.chunks[index].slot
            count = seq.params.prompt_logprobs or 0
            assert seq.prompt_logprobs is not None
            for part in range(0, len(wanted), _SCORED_AT_ONCE):
                targets = wanted[part : part + _SCORED_AT_ONCE].to(hidden.device)
                slots = np.full(len(targets), slot, np.int32) if adapted else None
                logits = self._head(slots)(hidden[begin + part : begin + part + len(targets)]).float()
                scored = logprobs_of(logits, targets, count, one_by_one=self._rows.one_by_one, ranked=True)
                seq.prompt_logprobs.extend(scored.to_lists([count] * len(targets)))
