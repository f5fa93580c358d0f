"""A step over all ranks.

Stages form a ring: the first embeds and starts the residual stream, each runs its layers and passes the stream on,
the last sends the final hidden states back to rank 0, which samples. So logits, many times wider than hidden
states, never leave the first stage. Within a stage all shards do the same; their sums are in the linears.

A stage does not wait for the next one: it sends and goes on to the step after. Rank 0 likewise launches a step
(`LeadDecoder.begin`) and takes its hidden states later, when other steps are on their way behind it. All ranks do what
rank 0 says in the order in which it says it, so what a step reads in a cache was written there before.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.adapters.runtime import AdapterRuntime
from penstock.engine.backends.host_memory import is_host
from penstock.engine.backends.interface import AttentionBatch, Followers, HostBatch, Ints
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.tap import StageTappedDecoder
from penstock.engine.parallel.channel import TARGET, Capture, Forward, Head, Replay
from penstock.engine.parallel.data import Share, Shares
from penstock.engine.parallel.groups import Group, Groups, Transfer
from penstock.engine.parallel.launch import Ranks
from penstock.engine.runner.executor import Releasable
from penstock.errors import ReplicaLost


@dataclass(frozen=True, slots=True)
class Arriving:
    """A tensor that is being received, or that is there."""

    tensor: Tensor
    transfer: Transfer | None = None
    taken: Arriving | None = None
    """Streams that a drafter reads, of the stages before this one; see `models.tap`."""
    then: Callable[[Tensor], None] | None = None
    """Called with it, once it is there."""

    def take(self) -> Tensor:
        """Wait for it."""
        if self.transfer is not None:
            self.transfer.wait()
        if self.then is not None:
            self.then(self.tensor)
        return self.tensor


class Stage(Releasable):
    """One rank's part of every step."""

    def __init__(self, decoder: Decoder, groups: Groups, shares: Shares | None = None) -> None:
        """`shares`: divides steps between shards that have sequences of their own."""
        self.decoder = decoder
        self.groups = groups
        self.shares = shares
        self._sent: deque[tuple[Transfer, Tensor]] = deque()
        """What may still be on its way, oldest first."""

    def expect(self, tokens: int, device: torch.device) -> Arriving | None:
        """Begin to receive a step's residual stream; None in the first stage. Steps are expected in their order."""
        ring, place = self.groups.pipeline, self.groups.place
        if ring is None or place.first:
            return None
        shape = tokens, self.decoder.stream_width
        stream = torch.empty(shape, dtype=self.decoder.stream_dtype, device=device)
        transfer = ring.begin_receive(stream, place.stage - 1)
        tapped = self._tapped
        taken = None if tapped is None else self._receive(tapped.stage.before, tokens, device, ring, place.stage - 1)
        return Arriving(stream, transfer, taken)

    @property
    def _tapped(self) -> StageTappedDecoder | None:
        """Where streams are read for a drafter on rank 0: they pass the first shards of all stages."""
        return self.decoder if isinstance(self.decoder, StageTappedDecoder) else None

    def _receive(self, streams: int, tokens: int, device: torch.device, group: Group, source: int) -> Arriving | None:
        if not streams:
            return None
        shape = tokens, streams * self.decoder.residual_width
        taken = torch.empty(shape, dtype=self.decoder.embedding.dtype, device=device)
        return Arriving(taken, group.begin_receive(taken, source))

    def forward(
        self, token_ids: Tensor, batch: AttentionBatch, kv: KVCache, arriving: Arriving | None = None
    ) -> Arriving:
        """Run this stage's layers on what the stage before it sent (`expect`), and send the result on. On rank 0: the
        final hidden states, which come round the ring."""
        ring, back, shards, place = self.groups.pipeline, self.groups.back, self.groups.tensor, self.groups.place
        if arriving is not None:
            stream = self.decoder.entered(arriving.take())
        else:
            if shards is not None and not is_host(token_ids.device):
                shards.broadcast(token_ids)  # some were sampled on rank 0's device and never on the host
            stream = self.decoder.embed(token_ids if batch.share is None else batch.share.take(token_ids))
        hidden, taken = self._run(stream, batch, kv, arriving)
        if batch.share is not None and place.stage == place.pipeline - 1:
            hidden = batch.share.collect(hidden, shards)
            taken = None if taken is None else batch.share.collect(taken, shards)
        if ring is None:
            if batch.share is not None and place.rank == 0 and self._tapped is not None:
                self._tapped.keep(hidden, hidden if taken is None else taken, _slots(batch), kv)
            return Arriving(hidden)
        if place.stage < ring.size - 1:
            self._send(self.decoder.passed_on(stream), ring, place.stage + 1)
            if taken is not None:
                self._send(taken, ring, place.stage + 1)
        elif back is not None:
            self._send(hidden, back, 0)
            if taken is not None:
                self._send(taken, back, 0)
        if place.rank == 0 and back is not None:
            final = hidden.new_empty(len(token_ids), hidden.shape[1])
            transfer = back.begin_receive(final, back.size - 1)
            return Arriving(final, transfer, then=self._keep(batch, kv, back, final))
        return Arriving(hidden)

    def _run(
        self, stream: Tensor, batch: AttentionBatch, kv: KVCache, arriving: Arriving | None
    ) -> tuple[Tensor, Tensor | None]:
        """This stage's layers. With a drafter also the streams that were read so far, if any were."""
        tapped = self._tapped
        if tapped is None:
            return self.decoder.run(stream, batch, kv), None
        hidden, taken = tapped.run_tapped(stream, batch, kv)
        if arriving is not None and arriving.taken is not None:
            taken = torch.cat((arriving.taken.take(), taken), dim=1)
        return hidden, taken if taken.shape[1] else None

    def _keep(self, batch: AttentionBatch, kv: KVCache, back: Group, final: Tensor) -> Callable[[Tensor], None] | None:
        """On rank 0: what keeps the streams of a step for the drafter."""
        tapped = self._tapped
        if tapped is None:
            return None
        arriving = self._receive(tapped.stage.every, len(final), final.device, back, back.size - 1)
        slots = _slots(batch)

        def keep(hidden: Tensor) -> None:
            tapped.keep(hidden, hidden if arriving is None else arriving.take(), slots, kv)

        return keep

    def whole(self, token_ids: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        """A step that every rank calls by itself, waited for. In the first stage: the final hidden states."""
        hidden = self.forward(token_ids, batch, kv, self.expect(len(batch.positions), kv.device)).take()
        self._settle()
        shards, place = self.groups.tensor, self.groups.place
        return shards.broadcast(hidden) if shards is not None and place.first and place.pipeline > 1 else hidden

    def release(self) -> Callable[[], None]:
        self._settle()
        return lambda: None

    def start_over(self) -> None:
        """Steps in flight are lost."""
        self._sent.clear()

    def _settle(self) -> None:
        """Wait until everything sent has left, and keep nothing of it."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _send(self, x: Tensor, group: Group, to: int) -> None:
        """Rank 0 has at most a few steps in flight, so what was sent long before has arrived."""
        if len(self._sent) > 2 * group.size:
            self._sent.popleft()[0].wait()
        self._sent.append((group.begin_send(x, to), x))

    def head(self, hidden: Tensor) -> Tensor:
        """Logits; the hidden states are rank 0's. Only in the first stage."""
        if self.groups.tensor is not None:
            self.groups.tensor.broadcast(hidden)
        return self.decoder.head(hidden)


def _slots(batch: AttentionBatch) -> Tensor:
    """Of all tokens of a step, also those of other shards; a copy, for the next step may be packed in the same
    memory."""
    if batch.share is None:
        return batch.slots.clone()
    return torch.from_numpy(batch.share.slots.copy()).to(batch.slots.device, non_blocking=True)


class LeadHead:
    """Rank 0's head: makes the other shards run theirs."""

    def __init__(self, stage: Stage, ranks: Ranks, model: int, adapters: AdapterRuntime | None = None) -> None:
        """`adapters`: where the head has some, knows those of the rows."""
        self._stage = stage
        self._adapters = adapters
        self._ranks = ranks
        self._model = model
        self.weight_bytes = stage.decoder.head.weight_bytes

    def __call__(self, x: Any) -> Tensor:
        with self._ranks.lost_if_it_fails():
            slots = None if self._adapters is None else self._adapters.slots.astype(np.int64)
            self._ranks.tell(Head(len(x), self._model, slots).encode(), self._stage.groups.place.tensor)
            return self._stage.head(x.contiguous())


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadDecoder(Decoder):
    """Rank 0's decoder: looks like any other, and has every step run by all ranks that have a part of the model."""

    stage: Stage
    ranks: Ranks
    model: int
    known: Ints
    """The block tables as the other ranks know them."""
    plain: Stage | None = None
    """The stage without adapters, where `stage` has some."""
    adapters: AdapterRuntime | None = None
    """Where its layers have adapters: knows those of the step."""
    narrow: bool = False
    """Whether its layers have them on query, key and value only."""
    further: bool = False
    """Whether its layers have them on linears that few adapters touch, too."""
    altered: bool = False
    """See `AdaptedModel`."""

    @property
    def launched_eagerly(self) -> bool:
        return self.stage.decoder.launched_eagerly

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        return self.begin(token_ids, batch, kv)()

    def begin(self, token_ids: Tensor, batch: AttentionBatch, kv: KVCache) -> Callable[[], Tensor]:
        if batch.host is None:
            raise ReplicaLost("a step came without the host's copy of its inputs, which other ranks need")
        with self.ranks.lost_if_it_fails():
            message = self._message(batch.host, batch)
            self.ranks.tell(message.encode(), self.stage.groups.place.world)
            if self.stage.shares is None:
                arriving = self.stage.forward(token_ids, batch, kv)
            else:
                share = self.stage.shares.of(message)
                arriving = self._stage_of(share).forward(token_ids, share.batch(batch.block_tables), kv)
        return partial(self._take, arriving)

    def _take(self, arriving: Arriving) -> Tensor:
        with self.ranks.lost_if_it_fails():
            return arriving.take()

    def run(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        return self.stage.decoder.run(residual, batch, kv)

    def _stage_of(self, share: Share) -> Stage:
        """The stage that runs rank 0's own part of a step, with the adapters of its tokens or without any."""
        if self.adapters is None:
            return self.stage
        if share.message.adapter_slots is None:
            assert self.plain is not None
            return self.plain
        self.adapters.kernel.begin(share.message.adapter_slots.astype(np.int32))
        return self.stage

    def start_over(self) -> None:
        """A rank is lost; the one in its place knows nothing."""
        self.stage.start_over()
        self.known[:] = 0

    @property
    def followers(self) -> Followers | None:
        return LeadFollowers(self) if self.stage.groups.capturable and self.stage.shares is None else None

    def captured(self) -> Decoder:
        return part_of(self.stage)

    def _message(self, host: HostBatch, batch: AttentionBatch) -> Forward:
        return Forward(
            host.token_ids,
            host.positions,
            host.slots,
            host.query_starts,
            host.context_lens,
            host.rows,
            self.changes(host),
            batch.num_decodes,
            batch.max_query,
            batch.max_context,
            model=self.model,
            adapter_slots=None if self.adapters is None else self.adapters.slots.astype(np.int64),
            narrow=self.narrow,
            further=self.further,
            altered=self.altered,
            states=host.states,
        )

    def changes(self, host: HostBatch) -> Ints:
        """Cells of this step's block tables that the others do not know yet: [3, n] of row, column, block."""
        width = -(-int(host.context_lens.max()) // host.block_size)
        now, known = host.tables[host.rows, :width], self.known[host.rows, :width]
        at, columns = np.nonzero(now != known)
        rows, blocks = host.rows[at], now[at, columns]
        self.known[rows, columns] = blocks
        return np.stack((rows, columns, blocks)).astype(np.int64)


class LeadFollowers:
    """See `Followers`: those that have a part of the decoder's model."""

    def __init__(self, decoder: LeadDecoder) -> None:
        self._decoder = decoder

    def capture(self, kind: int, shape: Sequence[int]) -> None:
        self._tell(Capture(kind, (shape[0], shape[1]), self._decoder.model).encode())

    def replay(self, kind: int, shape: Sequence[int], inputs: npt.NDArray[np.uint8], host: HostBatch) -> None:
        cells = self._decoder.changes(host)
        self._tell(Replay(kind, (shape[0], shape[1]), cells, inputs, self._decoder.model).encode())

    def _tell(self, message: bytes) -> None:
        ranks = self._decoder.ranks
        with ranks.lost_if_it_fails():
            ranks.tell(message, self._decoder.stage.groups.place.world)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDecoder(Decoder):
    """A rank's own part of a step, with its collectives: every rank runs it at the same time."""

    stage: Stage

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        return self.stage.forward(token_ids, batch, kv).take()

    def run(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        return self.stage.decoder.run(residual, batch, kv)


def part_of(stage: Stage) -> PartDecoder:
    """For captured steps: no messages, and hidden states are where the head needs them."""
    decoder = stage.decoder
    return PartDecoder(**{field.name: getattr(decoder, field.name) for field in fields(Decoder)}, stage=stage)


def lead(
    decoder: Decoder,
    ranks: Ranks,
    max_rows: int,
    max_blocks: int,
    *,
    model: int = TARGET,
    groups: Groups | None = None,
    shares: Shares | None = None,
) -> LeadDecoder:
    """Rank 0's decoder over its own part of a model, which all ranks share, or those of `groups`."""
    stage = Stage(decoder, groups or ranks.groups, shares)
    whole = stage.groups.tensor is None or decoder.config.by_transformers
    head: Linear = decoder.head if whole else LeadHead(stage, ranks, model)
    parts = {field.name: getattr(decoder, field.name) for field in fields(Decoder)}
    known = np.zeros((max_rows, max_blocks), np.int64)
    made = LeadDecoder(**{**parts, "head": head}, stage=stage, ranks=ranks, model=model, known=known)
    ranks.when_lost.append(made.start_over)
    return made


def lead_adapted(plain: LeadDecoder, adapters: AdapterRuntime) -> None:
    """Have all ranks run the steps with adapters too."""

    def led(decoder: Decoder, narrow: bool = False, further: bool = False, altered: bool = False) -> LeadDecoder:
        stage = Stage(decoder, plain.stage.groups, plain.stage.shares)
        plain.ranks.when_lost.append(stage.start_over)
        head = plain.head
        if further:
            alone = stage.groups.tensor is None
            head = decoder.head if alone else LeadHead(stage, plain.ranks, plain.model, adapters)
        return dataclasses.replace(
            plain,
            head=head,
            layers=decoder.layers,
            fused_up_to=decoder.fused_up_to,
            stage=stage,
            plain=plain.stage,
            adapters=adapters,
            narrow=narrow,
            further=further,
            altered=altered,
        )

    adapters.decoder = led(adapters.model.decoder)
    if adapters.model.further is not None:
        adapters.further = led(adapters.model.further, further=True)
    if adapters.model.altered is not None:
        adapters.altered = led(adapters.model.altered, further=True, altered=True)
    if adapters.model.narrow is not None:
        adapters.narrow = led(adapters.model.narrow, narrow=True)
