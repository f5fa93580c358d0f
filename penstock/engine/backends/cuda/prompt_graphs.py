"""Short prompt steps as CUDA graphs: up to about a thousand tokens, launching the kernels of a step takes longer than
running them.

A graph is captured per shape: places for decoded tokens, followed by places for prompt tokens. A step runs in the
smallest shape that holds it. Unused places for decodes read the scratch row; unused prompt tokens form a sequence of
their own in the scratch row, whose keys and values land in block 0, so that every number in the step stays finite. Up
to `PROMPTS` prompts (or chunks of one) fit into a step; unused ones are sequences without tokens. Where layers keep
states, padding starts from none and keeps none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.backends.cuda.capture import GraphPool, record, watched
from penstock.engine.backends.cuda.deferred import Deferred, LaterCaptures
from penstock.engine.backends.cuda.long_prompts import Gathering
from penstock.engine.backends.cuda.packed_inputs import Field, PackedInputs
from penstock.engine.backends.cuda.rehearsal import Short
from penstock.engine.backends.cuda.state_fields import STATE_FIELDS, by_name, state_batch, steps_have_states
from penstock.engine.backends.interface import AttentionBatch, Followers, HostBatch
from penstock.engine.batch import Batch
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.absent import NoMixer
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.layers.delta_net import GatedDeltaNet
from penstock.engine.models.layers.latent_attention import LatentAttention
from penstock.engine.models.layers.mamba import Mamba2
from penstock.engine.models.layers.short_conv import ShortConv
from penstock.engine.models.layers.side_by_side import SideBySide
from penstock.engine.runner.follower import BlockTables
from penstock.engine.runner.inputs import Packed
from penstock.engine.runner.rows import FLOATS, Rows

PROMPTS = 8
"""Most prompts in a captured step."""
TOKENS = (*range(32, 256, 32), *range(256, 512, 64), *range(512, 1025, 128))
"""Numbers of prompt tokens that get a graph when nothing else runs."""
DECODES = (16, 64, 256)
"""Numbers of decoded tokens beside prompts."""
DECODES_LATER = (32, 96, 128, 192)
"""Further ones: captured later, and until then padded to the ones above."""
TOKENS_BESIDE_DECODES = (64, 128, 192, 256, 384, 512, 640, 768, 896, 1024)
AT_START, AT_START_BESIDE_DECODES = (64, 128, 256, 512, 1024), (128, 256, 512, 1024)
"""Of both, those that are captured before the first request: each takes a moment of the start."""
WANTED = 8
"""Steps with hundreds of padding tokens that are as long as capturing one of the right size."""
_MIXERS = Attention | LatentAttention | GatedDeltaNet | Mamba2 | ShortConv | SideBySide | NoMixer
"""Those that leave padding alone."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Places of a captured step."""

    decodes: int
    tokens: int
    """Of prompts, padding included."""

    @property
    def total(self) -> int:
        return self.decodes + self.tokens

    @property
    def sequences(self) -> int:
        """The last one holds the padding."""
        return self.decodes + PROMPTS + 1

    @property
    def samples(self) -> int:
        return self.decodes + PROMPTS

    def fields(self, *, states: bool) -> list[Field]:
        """Inputs of the step; `states`: also where those of its sequences lie."""
        per_token = [Field(name, np.int64, self.total) for name in ("ids", "token_rows", "positions", "slots")]
        per_token += [Field(name, kind, self.total) for name, kind in STATE_FIELDS if states]
        per_sample = [Field(name, np.int64, self.samples) for name in ("sample_at", "sample_rows", "keys", "stores")]
        per_sequence = [Field(name, np.int32, self.sequences) for name in ("rows", "contexts")]
        return [*per_token, *per_sample, *per_sequence, Field("starts", np.int32, self.sequences + 1)]


def shapes_for(max_rows: int, max_context: int) -> list[Shape]:
    """All shapes, smallest first. The padding must fit into the scratch row's block table."""
    shapes = [Shape(0, tokens) for tokens in TOKENS]
    for decodes in sorted({min(count, max_rows) for count in (*DECODES, *DECODES_LATER)}):
        shapes += [Shape(decodes, tokens) for tokens in TOKENS_BESIDE_DECODES]
    return sorted((shape for shape in shapes if shape.tokens <= max_context), key=lambda shape: shape.total)


def arrange(packed: Packed, shape: Shape, scratch_row: int) -> dict[str, np.ndarray]:
    """The fields of a step in `shape`; those of samples may be shorter than their field."""
    host, decodes = packed.host, packed.num_decodes
    tokens = len(host.token_ids) - decodes
    prompts = len(host.rows) - decodes
    filled = shape.decodes + tokens
    padding = np.arange(shape.tokens - tokens)

    def places(of_tokens: np.ndarray, unused: int, behind: np.ndarray | int) -> np.ndarray:
        """One value per place of a token: of the decodes, of unused ones, of the prompts, of the padding."""
        field = np.empty(shape.total, np.int64)
        field[:decodes] = of_tokens[:decodes]
        field[decodes : shape.decodes] = unused
        field[shape.decodes : filled] = of_tokens[decodes:]
        field[filled:] = behind
        return field

    ids, token_rows = host.token_ids.copy(), np.full(len(host.token_ids), scratch_row)
    ids[packed.holes], token_rows[packed.holes] = -1, packed.hole_rows
    rows = np.full(shape.sequences, scratch_row, np.int32)
    contexts = np.ones(shape.sequences, np.int32)
    for field, values in ((rows, host.rows), (contexts, host.context_lens)):
        field[:decodes] = values[:decodes]
        field[shape.decodes : shape.decodes + prompts] = values[decodes:]
    contexts[-1] = len(padding)
    starts = np.full(shape.sequences + 1, filled, np.int32)
    starts[: shape.decodes] = np.arange(shape.decodes)
    begins = host.query_starts[decodes:] - decodes + shape.decodes
    starts[shape.decodes : shape.decodes + prompts + 1] = begins
    starts[-1] = shape.total
    at = packed.sample_at
    final = np.append(packed.sample_rows[1:] != packed.sample_rows[:-1], True)[: len(at)]
    fields = {
        "ids": places(ids, 0, 0),
        "token_rows": places(token_rows, scratch_row, scratch_row),
        "positions": places(host.positions, 0, padding % host.block_size),
        "slots": places(host.slots, 0, padding % host.block_size),
        "sample_at": np.where(at < decodes, at, at - decodes + shape.decodes),
        "sample_rows": packed.sample_rows,
        "keys": packed.keys(),
        # Of several samples of one row (draft tokens being verified) the last one stays.
        "stores": np.where(final, packed.sample_rows, scratch_row),
        "rows": rows,
        "contexts": contexts,
        "starts": starts,
    }
    if host.states is not None:
        first, last, reads, writes = host.states
        moved = np.where(np.arange(len(first)) < decodes, 0, shape.decodes - decodes)
        runs = (places(first + moved, 0, filled), places(last + moved, 0, shape.total - 1))
        fields |= by_name((*runs, places(reads, 0, 0), places(writes, 0, 0)))
    return fields


def _nothing(block_size: int, *, states: bool) -> Packed:
    """A step without tokens: all padding."""
    none, zero = np.zeros(0, np.int64), np.zeros(1, np.int64)
    nowhere = np.zeros((4, 0), np.int64) if states else None
    host = HostBatch(none, none, none, zero, none, none, np.zeros((0, 0), np.int32), block_size, nowhere)
    return Packed(host, 0, 0, none, none, np.zeros(0, np.uint16), np.zeros(0, np.uint64), none, none)


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: PackedInputs
    logits: Tensor
    tokens: Tensor


class PromptGraphs(LaterCaptures[Shape]):
    """Graphs of steps that compute a few prompt tokens, with or without decodes beside them."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        rows: Rows | BlockTables,
        *,
        max_rows: int,
        pool: GraphPool,
        followers: Followers | None = None,
        kind: int = 0,
    ) -> None:
        """`kind`: what the followers know these graphs by."""
        self.followers = followers
        self.kind = kind
        self.decoder = decoder
        self.kv = kv
        self.rows = rows
        self.scratch_row = max_rows
        self._padding = {"sample_rows": max_rows, "stores": max_rows}
        self._shapes = shapes_for(max_rows, rows.max_context)
        self._captured: dict[Shape, _Captured] = {}
        self._later = Deferred[Shape](WANTED)
        self._pool = pool
        self._short = Short(decoder, kv)
        self.stateful = steps_have_states(decoder, kv)
        self._applies = all(isinstance(layer.mixer, _MIXERS) for layer in decoder.layers)
        self._gathering = Gathering(decoder, kv)

    def shape_of(self, batch: Batch) -> Shape | None:
        """The smallest shape that holds a step; None when there is none, or the step needs more than samples."""
        tokens = batch.num_tokens - batch.num_decodes
        if not self._applies or not 0 < tokens <= TOKENS[-1]:
            return None
        chunks = batch.chunks
        if len(chunks) > PROMPTS and not chunks[-PROMPTS - 1].decodes:
            return None
        if any(chunk.seq.prompt_logprobs is not None for chunk in chunks[-PROMPTS:]):
            return None
        decodes = batch.num_decodes
        most = self._gathering.most_places([chunk for chunk in chunks[-PROMPTS:] if not chunk.decodes])
        fitting = [shape for shape in self._shapes if tokens <= shape.tokens <= most and shape.decodes >= decodes]
        shape = self._later.choose(fitting)
        if shape is not None and shape in self._later:  # it has to be captured now
            try:
                self.capture(shape)
            except RuntimeError as error:  # such as no memory for another
                self._later.give_up(error)
                return self._later.choose(fitting)
        return shape

    def replay(self, packed: Packed, shape: Shape) -> tuple[Tensor, Tensor]:
        """Run a step; logits [samples, vocab] and sampled tokens [samples], valid until the next replay of any graph of
        the pool.

        The tokens follow temperature and seed alone; rows that need more are sampled again from the logits.
        """
        captured = self._captured.get(shape) or self.capture(shape)
        inputs = captured.inputs.fill(arrange(packed, shape, self.scratch_row), self._padding)
        if self.followers is not None:
            self.followers.replay(self.kind, (shape.decodes, shape.tokens), inputs, packed.host)
        captured.inputs.upload()
        captured.graph.replay()
        count = len(packed.sample_at)
        return captured.logits[:count], captured.tokens[:count]

    def follow(self, shape: Shape, packed: npt.NDArray[np.uint8]) -> None:
        """Run a step that rank 0 has packed."""
        captured = self._captured[shape]
        captured.inputs.load(packed)
        captured.graph.replay()

    def capture_all(self, token_budget: int) -> None:
        """Capture the shapes that steps of `token_budget` tokens can need, largest first; most of them later."""
        self._later = Deferred(WANTED)
        if not self._applies:
            return
        shapes = [shape for shape in self._shapes if shape.tokens <= token_budget]
        most = {shape.decodes: shape.tokens for shape in shapes}  # the largest comes last
        first = [shape for shape in shapes if self._at_start(shape, most[shape.decodes])]
        for shape in reversed(first):
            self.capture(shape)
        later = [shape for shape in shapes if shape not in first]
        self._later.add(sorted(later, key=lambda shape: (shape.decodes, shape.tokens)))

    def _at_start(self, shape: Shape, most_tokens: int) -> bool:
        """Whether a shape is captured before the first request; those that are cover all others."""
        if shape.decodes not in (0, *DECODES, self.scratch_row):
            return False
        return shape.tokens == most_tokens or shape.tokens in (AT_START_BESIDE_DECODES if shape.decodes else AT_START)

    def forget(self) -> list[Shape]:
        """Drop every graph, because what they read is about to move; the shapes to capture again at once, largest
        first. Others are captured later again."""
        most = {shape.decodes: shape.tokens for shape in sorted(self._captured, key=lambda shape: shape.total)}
        shapes = sorted(self._captured, key=lambda shape: -shape.total)
        later = [shape for shape in reversed(shapes) if not self._at_start(shape, most[shape.decodes])]
        self._later.add(later)
        shapes = [shape for shape in shapes if shape not in self._later]
        self._captured.clear()
        self._pool.forget()
        self._short.forget()
        return shapes

    def capture(self, shape: Shape) -> _Captured:
        """Capture one shape."""
        if self.followers is not None:
            self.followers.capture(self.kind, (shape.decodes, shape.tokens))
        device = self.kv.device
        inputs = PackedInputs(shape.fields(states=self.stateful), device)
        nothing = _nothing(self.kv.block_size, states=self.stateful)
        inputs.send(arrange(nothing, shape, self.scratch_row), self._padding)
        recording = record(
            device,
            lambda: self.step(inputs, shape),
            self._pool,
            lambda: self.step(inputs, shape, *self._short.parts),
        )
        captured = _Captured(recording.graph, inputs, *recording.results)
        self._captured[shape] = captured
        self._later.done(shape)
        return captured

    def step(
        self, inputs: PackedInputs, shape: Shape, decoder: Decoder | None = None, kv: KVCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """The work of a step, on fixed addresses. `decoder`, `kv`: with other layers."""
        rows = self.rows
        ids = rows.known_tokens(inputs.view("ids", torch.int64), inputs.view("token_rows", torch.int64))
        batch = AttentionBatch(
            positions=inputs.view("positions", torch.int64),
            slots=inputs.view("slots", torch.int64),
            query_starts=inputs.view("starts", torch.int32),
            context_lens=inputs.view("contexts", torch.int32),
            rows=inputs.view("rows", torch.int32),
            block_tables=rows.block_tables,
            num_decodes=shape.decodes,
            max_query=shape.tokens,
            max_context=rows.max_context,
            longest=self.decoder.captured_context,
            total_context=self._gathering.total_context(shape.tokens, PROMPTS),
        )
        if self.stateful:
            batch.states = state_batch(inputs.view)
        hidden = (decoder or self.decoder).forward(ids, batch, watched(kv or self.kv))
        logits = self.decoder.head(hidden[inputs.view("sample_at", torch.int64)])
        if isinstance(rows, BlockTables):
            return logits, logits  # rank 0 samples
        temperatures = rows.floats[inputs.view("sample_rows", torch.int64), FLOATS.index("temperature")]
        tokens = self.decoder.ops.gumbel_argmax(logits, temperatures, inputs.view("keys", torch.int64))
        rows.last_tokens[inputs.view("stores", torch.int64)] = tokens
        return logits, tokens
