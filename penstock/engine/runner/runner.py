"""Runs a batch on the device: inputs, decoder, sampler, and an asynchronous way back for the tokens.

`run` returns without waiting. On CUDA the result is copied to pinned memory behind the step and `wait` blocks on its
event; the next step takes the sampled tokens from the device rows, so it can be launched before anybody waited.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from penstock.engine.adapters.apply import GraphLora
from penstock.engine.adapters.runtime import AdapterRuntime, is_narrow
from penstock.engine.backends.cpu.ops import CpuOps
from penstock.engine.backends.cpu.recorded_step import Tape, record
from penstock.engine.backends.cuda.graphs import DecodeGraphs
from penstock.engine.backends.interface import Ints
from penstock.engine.kv.cache import KVCache
from penstock.engine.kv.mover import BlockMover
from penstock.engine.models.decoder import Decoder
from penstock.engine.request import TokenLogprob
from penstock.engine.runner.inputs import InputBuilder, Packed, chunk_targets, decode_entries, sampling_chunks
from penstock.engine.runner.rows import Flag, Rows
from penstock.engine.runner.sampler import LogprobTensors, SampleRequest, logprobs_of, sample
from penstock.engine.scheduler import Batch, Chunk
from penstock.engine.sequence import Sequence
from penstock.engine.speculative.verification import count_accepted

_SCORED_AT_ONCE = 128
"""Prompt positions whose logits exist at the same time; bounds the memory of prompt log-probabilities."""


Sampled = tuple[Chunk, list[int], list[TokenLogprob] | None]
"""On the host: a chunk, the tokens that a step added behind it (with guesses, one more for each that was right), and
their log-probabilities where they are wanted."""


@dataclass(slots=True)
class PendingStep:
    """A step that has been launched."""

    batch: Batch
    rows: Rows
    chunks: list[Chunk] = field(default_factory=list)
    """The chunk of each sampled token; see `SampleRequest`."""
    tokens: Tensor | Ints | None = None
    logprobs: LogprobTensors | None = None
    event: torch.cuda.Event | None = None

    def last_tokens(self) -> list[tuple[Sequence, int]]:
        """Block until the step's tokens are on the host; of each sequence the one behind its last token."""
        return list({chunk.seq: token for chunk, token in zip(self.chunks, self._tokens(), strict=True)}.items())

    def _tokens(self) -> list[int]:
        if self.event is not None:
            self.event.synchronize()
        return [] if self.tokens is None else self.tokens.tolist()

    def wait(self) -> list[Sampled]:
        """Block until the step's tokens are on the host; they come in batch order."""
        tokens = self._tokens()
        if self.batch.plain and self.logprobs is None:
            return [(chunk, [token], None) for chunk, token in zip(self.chunks, tokens, strict=True)]
        logprobs = None
        if self.logprobs is not None:
            logprobs = self.logprobs.to_lists([chunk.seq.params.logprobs for chunk in self.chunks])
        sampled: list[Sampled] = []
        at = 0
        while at < len(tokens):
            chunk = self.chunks[at]
            kept = at + 1 + count_accepted(chunk.drafts, tokens[at:])
            scores = None if logprobs is None else [score for score in logprobs[at:kept] if score is not None]
            sampled.append((chunk, tokens[at:kept], scores or None))
            if chunk.drafts:
                self.rows.count(chunk.seq, tokens[at:kept])
            at += 1 + len(chunk.drafts)
        return sampled


class Runner:
    """Owns the decoder, the KV cache and the device rows."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        *,
        max_rows: int,
        max_model_len: int,
        block_size: int,
        max_verified: int = 0,
        adapters: AdapterRuntime | None = None,
        followed: int = ~0,
        deterministic: bool = False,
        several_ranks: bool = False,
        mover: BlockMover | None = None,
    ) -> None:
        """`max_verified`: most decoded tokens in a step that verifies guesses. `followed`: see `Rows`. `mover`: makes
        the copies to and from the host."""
        self.decoder = decoder
        self.adapters = adapters
        self.max_verified = max_verified
        self.kv = kv
        # One row more than sequences can have: the scratch row that pads CUDA graphs.
        self.rows = Rows(
            max_rows + 1, max_model_len, decoder.config.vocab_size, kv.device, block_size, followed, deterministic
        )
        self.inputs = InputBuilder(self.rows, block_size, keep_host=several_ranks, alone=deterministic)
        self.graphs: DecodeGraphs | None = None
        self.tape: Tape | None = None
        self.mover = mover
        self.adapted_graphs: DecodeGraphs | None = None
        self.narrow_graphs: DecodeGraphs | None = None
        self.adapted_tape: Tape | None = None
        """For steps in which some sequence uses an adapter."""
        # The other ranks are told of every step and launch it themselves: they have no graphs.
        if kv.device.type == "cuda" and not several_ranks:
            self.graphs = DecodeGraphs(decoder, kv, self.rows, max_rows=max_rows, max_tokens=max_verified)
            if adapters is not None and isinstance(adapters.kernel, GraphLora):
                self.adapted_graphs = self.graphs.with_adapters(adapters.decoder, adapters.kernel)
                if adapters.narrow is not None:
                    self.narrow_graphs = self.graphs.with_adapters(adapters.narrow, adapters.kernel)

    def run(self, batch: Batch) -> PendingStep:
        """Launch one step."""
        if batch.transfers is not None:
            assert self.mover is not None
            self.mover.run(batch.transfers)
        if self.adapters is not None:
            self.adapters.settle()
        step = None
        if batch.plain and self.tape is not None:
            adapted = self.adapters is not None and self.adapters.begin(batch)
            step = self._decode(self.adapted_tape if adapted else self.tape, batch)
        return self._launch(batch) if step is None else step

    @torch.inference_mode()
    def _launch(self, batch: Batch) -> PendingStep:
        graphs = self._graphs_for(batch)
        if graphs is not None:
            return self._replay(graphs, batch)
        packed = self.inputs.pack(batch)
        decoder, tape = self.decoder, self.tape
        if self.adapters is not None and (adapted := self.adapters.begin(batch)) is not None:
            decoder, tape = adapted, self.adapted_tape
        step = PendingStep(batch, self.rows)
        if tape is not None and tape.fits(batch.num_tokens, len(packed.host.rows), len(packed.sample_at)):
            self._play(tape, step, packed)
            return step
        inputs = self.inputs.upload(batch, packed)
        hidden = decoder.forward(inputs.token_ids, inputs.attention, self.kv)
        self._score_prompts(batch, hidden)
        if inputs.sampling is not None:
            self._sample(step, self.decoder.head(hidden[inputs.sample_at]), inputs.sampling)
        return step

    def _graphs_for(self, batch: Batch) -> DecodeGraphs | None:
        """The graphs that can run a batch; None when it has to be launched kernel by kernel."""
        if self.graphs is None or not self.graphs.fits(batch):
            return None
        if self.adapters is None or all(chunk.seq.slot < 0 for chunk in batch.chunks):
            return self.graphs
        return self.narrow_graphs if self.narrow_graphs is not None and is_narrow(batch) else self.adapted_graphs

    def capture_graphs(self) -> None:
        """Capture all graphs that steps may need, so that none of them waits for one."""
        for graphs in (self.graphs, self.adapted_graphs, self.narrow_graphs):
            if graphs is not None:
                graphs.capture_all()

    def record(self, tokens: int) -> None:
        """On CPU: record the forward pass for steps of up to `tokens` tokens, where it can be."""
        self.tape = self._record(self.decoder, tokens)
        if self.adapters is not None and self.tape is not None:
            self.adapted_tape = self._record(self.adapters.decoder, tokens)

    def _record(self, decoder: Decoder, tokens: int) -> Tape | None:
        if not isinstance(decoder.ops, CpuOps):
            return None
        samples = min(tokens, max(len(self.rows.block_tables), self.max_verified))
        return record(
            decoder.ops,
            decoder.forward,
            self.decoder.head,
            self.kv,
            self.rows.arrays(),
            block_size=self.inputs.block_size,
            tokens=tokens,
            sequences=tokens if self.inputs.alone else samples,
            samples=samples,
        )

    def _decode(self, tape: Tape | None, batch: Batch) -> PendingStep | None:
        """On CPU, nearly every step: from tokens to tokens natively. None when rows need more than a draw."""
        count = len(batch.chunks)
        if tape is None or not tape.has_head or not tape.fits(count, count, count):
            return None
        self.rows.update(batch)
        if tape.load_decodes(decode_entries(batch.chunks)) & ~Flag.RANDOM:
            return None
        return PendingStep(batch, self.rows, batch.chunks, tape.draw())

    def _play(self, tape: Tape, step: PendingStep, packed: Packed) -> None:
        """On CPU, any step that is recorded; rows that need more than a draw are sampled from its logits."""
        batch, at, flags = step.batch, packed.sample_at, packed.flags
        tape.load(packed.host, at, packed.sample_rows, packed.keys() if flags & Flag.RANDOM else None)
        if not len(at):
            tape.forward()
        elif not tape.has_head:
            self._sample(step, self.decoder.head(tape.forward()[at]), self.inputs.sampling_of(batch, packed))
        elif flags & ~Flag.RANDOM:
            self._sample(step, tape.logits(), self.inputs.sampling_of(batch, packed))
        else:
            step.chunks, step.tokens = sampling_chunks(batch), tape.draw()
        self._score_prompts(batch, tape.hidden)

    def _replay(self, graphs: DecodeGraphs, batch: Batch) -> PendingStep:
        """A pure decode step: the graph samples plain rows itself; others are sampled again from its logits."""
        step = PendingStep(batch, self.rows, sampling_chunks(batch))
        logits, tokens = graphs.replay(batch)
        request = self.inputs.sampling(batch) if self.rows.needs(batch, ~Flag.RANDOM) else None
        if request is not None:
            self._sample(step, logits, request)
        else:
            step.tokens = tokens
            self._send_home(step)
        return step

    def _sample(self, step: PendingStep, logits: Tensor, request: SampleRequest) -> None:
        if request.flags & ~(Flag.RANDOM | Flag.FILTER) or not logits.is_cuda:
            logits = logits.float()  # draws and filters on CUDA read the head's own dtype
        tokens, logprobs = sample(logits, request, self.rows, self.decoder.ops)
        if request.ahead is None:
            self.rows.last_tokens[request.rows] = tokens
        else:  # of a chunk with guesses, the last token's sample stays
            last = torch.from_numpy(np.flatnonzero(np.append(request.ahead[1:] == 0, True))).to(tokens.device)
            self.rows.last_tokens[request.rows[last]] = tokens[last]
        step.chunks, step.tokens, step.logprobs = request.chunks, tokens, logprobs
        if tokens.is_cuda:
            self._send_home(step)

    def _send_home(self, step: PendingStep) -> None:
        """Queue copies to pinned memory behind the step; `wait` then needs only the event."""
        assert isinstance(step.tokens, Tensor)
        step.tokens = _to_pinned(step.tokens)
        if step.logprobs is not None:
            step.logprobs = LogprobTensors(
                _to_pinned(step.logprobs.chosen), _to_pinned(step.logprobs.top_ids), _to_pinned(step.logprobs.top)
            )
        step.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        step.event.record()

    def _score_prompts(self, batch: Batch, hidden: Tensor) -> None:
        for index, begin, wanted in chunk_targets(batch):
            seq = batch.chunks[index].seq
            count = seq.params.prompt_logprobs or 0
            assert seq.prompt_logprobs is not None
            for part in range(0, len(wanted), _SCORED_AT_ONCE):
                targets = wanted[part : part + _SCORED_AT_ONCE].to(hidden.device)
                logits = self.decoder.logits(hidden[begin + part : begin + part + len(targets)])
                scored = logprobs_of(logits, targets, count, one_by_one=self.rows.one_by_one)
                seq.prompt_logprobs.extend(scored.to_lists([count] * len(targets)))


def _to_pinned(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
