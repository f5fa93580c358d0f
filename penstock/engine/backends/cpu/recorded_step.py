"""A step recorded once and run again in one native call: what CUDA graphs are on a GPU.

The decoder's Python runs a single time with the library replaced by a `Recorder`. A step then writes its inputs to the
addresses of the recording, says how many tokens, sequences and samples it has, and runs the list of calls as far as it
needs: to the hidden states, to the logits, or to the tokens sampled from them. A pass that does anything but native
calls (an expert router, oneDNN's matmul) cannot be recorded, and its decoder runs eagerly.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.cpu.layout import LayoutError
from penstock.engine.backends.cpu.lora import LORA_FAILURES
from penstock.engine.backends.cpu.native import CountPatch, DecodeArgs, RecordedCall
from penstock.engine.backends.cpu.ops import CpuOps
from penstock.engine.backends.cpu.quant_linear import QuantLinear
from penstock.engine.backends.cpu.recorder import SAMPLES, TOKENS, NotRecordableError, Recorder
from penstock.engine.backends.interface import AttentionBatch, Floats, HostBatch, Ints, StateBatch

log = logging.getLogger(__name__)

_FAILURES: Final = {
    ("pk_embed", 1): "a token id is outside the embedding table",
    ("pk_store_rows", 1): "a slot is outside the cache",
    **{("pk_lora", code): text for code, text in LORA_FAILURES.items()},
    ("pk_rope_and_cache", 1): "a position is outside the rotary table",
    ("pk_rope_and_cache", 2): "a slot is outside the cache",
}


Forward = Callable[[Tensor, AttentionBatch, Any], Tensor]
Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class RowArrays:
    """What is kept for every running sequence, a row each (see `penstock.engine.runner.rows`)."""

    tables: npt.NDArray[np.int32]
    """[rows, blocks], dense."""
    last_tokens: Ints
    seeds: npt.NDArray[np.uint64]
    temperatures: Floats
    flags: npt.NDArray[np.uint8]


class RecordedStep:
    """A recorded step of up to `tokens` tokens of `sequences` sequences, behind which up to `samples` are sampled.

    First `load` or `load_decodes`, then `forward`, `logits` or `draw`. The next run overwrites what they return, except
    the sampled tokens.
    """

    def __init__(
        self,
        ops: CpuOps,
        forward: Forward,
        head: Head,
        kv: Any,
        rows: RowArrays,
        *,
        block_size: int,
        tokens: int,
        sequences: int,
        samples: int,
        states: bool = False,
    ) -> None:
        """`states`: whether the step says where the states of recurrent layers lie."""
        self._ops = ops
        self._tokens, self._sequences, self._samples = tokens, sequences, samples
        inputs = AttentionBatch(
            positions=torch.zeros(tokens, dtype=torch.int64),
            slots=torch.zeros(tokens, dtype=torch.int64),
            query_starts=torch.zeros(sequences + 1, dtype=torch.int32),
            context_lens=torch.zeros(sequences, dtype=torch.int32),
            rows=torch.zeros(sequences, dtype=torch.int32),
            block_tables=torch.from_numpy(rows.tables),
            num_decodes=0,
            max_query=tokens,
            max_context=1,
        )
        where = torch.zeros(4, tokens, dtype=torch.int32)
        if states:
            inputs.states = StateBatch(*where)
        ids = torch.zeros(tokens, dtype=torch.int64)
        at = torch.zeros(samples, dtype=torch.int64)
        temperatures = torch.zeros(samples, dtype=torch.float32)
        keys = torch.zeros(samples, dtype=torch.int64)
        sample_rows = torch.zeros(samples, dtype=torch.int32)
        recorder = Recorder(ops.handle.lib)
        with ops.handle.replaced_by(recorder), recorder:
            self.hidden = forward(ids, inputs, kv)
            self._to_hidden = len(recorder.names)
            recorder.rows = SAMPLES
            chosen = F.embedding(at, self.hidden)
            self._to_chosen = len(recorder.names)
            self._logits = _record_head(recorder, head, chosen)
            self._to_logits, drawn = len(recorder.names), at
            if self._logits is not None:
                if isinstance(head, QuantLinear):
                    drawn = head.sample(chosen, temperatures, keys, self._logits)
                else:
                    self._to_chosen = self._to_logits
                    drawn = ops.gumbel_argmax(self._logits, temperatures, keys)
                kept = drawn.data_ptr(), sample_rows.data_ptr(), rows.last_tokens.ctypes.data
                recorder.record("pk_keep", (*kept, samples))
        self.names = recorder.names
        self._words, self._kept, self._arena = recorder.words, recorder.kept, recorder.arena
        lib = ops.handle.lib
        self._calls = (RecordedCall * len(self.names))(
            *(
                RecordedCall(ctypes.cast(getattr(lib, f"{name}_recorded"), ctypes.c_void_p), ctypes.addressof(words), 0)
                for name, words in zip(self.names, self._words, strict=True)
            )
        )
        self._patches = (CountPatch * len(recorder.patches))(*(CountPatch(*patch) for patch in recorder.patches))
        self._counts = (ctypes.c_int64 * 3)()
        # Arrays over the memory of the recorded inputs: filling one costs a tenth of a tensor operation.
        self._ids, self._positions, self._slots = ids.numpy(), inputs.positions.numpy(), inputs.slots.numpy()
        self._query_starts, self._context_lens = inputs.query_starts.numpy(), inputs.context_lens.numpy()
        self._rows = inputs.rows.numpy()
        self._states = where.numpy()
        self._at, self._temperatures, self._keys = at.numpy(), temperatures.numpy(), keys.numpy()
        self._sample_rows, self._drawn = sample_rows.numpy(), drawn.numpy()
        self._decodes: Ints = np.zeros(3 * sequences, np.int64)
        self._decodes_at: int = self._decodes.ctypes.data
        self._row_arrays = rows
        self._decode_args = self._make_decode_args(rows, block_size)
        self.has_head = self._logits is not None
        """Whether logits and sampling are part of it."""
        self.timed = False
        """Whether runs add up the time of each call; see `seconds`."""

    @property
    def nbytes(self) -> int:
        """Memory held for what a pass makes on its way."""
        return self._arena.nbytes

    def fits(self, tokens: int, sequences: int, samples: int) -> bool:
        """Whether a step of this size is one of those recorded."""
        return tokens <= self._tokens and sequences <= self._sequences and samples <= self._samples

    def load(self, step: HostBatch, at: Ints, rows: Ints, keys: Ints | None = None) -> None:
        """Take the inputs of any step. `at`: packed indices of the tokens behind which something is sampled; `rows`
        and noise `keys` of those; keys are not needed where all temperatures are 0."""
        tokens, sequences, samples = len(step.token_ids), len(step.rows), len(at)
        self._ids[:tokens] = step.token_ids
        self._positions[:tokens] = step.positions
        self._slots[:tokens] = step.slots
        self._query_starts[: sequences + 1] = step.query_starts
        self._context_lens[:sequences] = step.context_lens
        self._rows[:sequences] = step.rows
        if step.states is not None:
            self.load_states(step.states)
        self._at[:samples] = at
        self._sample_rows[:samples] = rows
        self._temperatures[:samples] = self._row_arrays.temperatures[rows]
        if keys is not None:
            self._keys[:samples] = keys
        self._counts[:] = [tokens, sequences, samples]

    def load_decodes(self, decodes: list[int]) -> int:
        """Take a step in which every sequence computes one token and samples behind it: token (-1: the one its row
        sampled last), position and row of each, one after the other. Returns the union of their rows' flags."""
        count = len(decodes) // 3
        self._decodes[: 3 * count] = decodes
        lib = self._ops.handle.lib
        flags: int = lib.pk_load_decodes(self._decode_args, self._decodes_at, count)
        if flags < 0:
            raise LayoutError("a position is outside the block table")
        self._counts[:] = [count, count, count]
        return flags

    def load_states(self, states: Ints) -> None:
        """[4, T]: the fields of `StateBatch`, in a model that has some."""
        self._states[:, : states.shape[1]] = states

    def forward(self) -> Tensor:
        """The hidden states of the step's tokens."""
        self._run(self._to_hidden)
        return self.hidden[: self._counts[TOKENS]]

    def logits(self) -> Tensor:
        """float32 [S, vocab] behind the tokens that sample."""
        assert self._logits is not None
        self._run(self._to_logits)
        return self._logits[: self._counts[SAMPLES]]

    def draw(self) -> Ints:
        """int64 [S]: tokens sampled behind those, as `Ops.gumbel_argmax` does; their rows remember them."""
        self._run(self._to_chosen)
        self._run(len(self.names), self._to_logits)
        return self._drawn[: self._counts[SAMPLES]].copy()

    def _run(self, end: int, begin: int = 0) -> None:
        handle, calls = self._ops.handle, ctypes.byref(self._calls, begin * ctypes.sizeof(RecordedCall))
        stopped = handle.lib.pk_run(
            handle.pointer, calls, end - begin, self._patches, len(self._patches), self._counts, self.timed
        )
        if stopped:
            name, code = self.names[begin + stopped // 256], stopped % 256
            raise LayoutError(_FAILURES.get((name, code), f"{name} stopped with code {code}"))

    def _make_decode_args(self, rows: RowArrays, block_size: int) -> DecodeArgs:
        if not rows.tables.flags.c_contiguous:
            raise LayoutError("block tables must be dense")
        targets: dict[str, npt.NDArray[Any]] = {
            "ids": self._ids, "positions": self._positions, "slots": self._slots, "at": self._at, "keys": self._keys,
            "query_starts": self._query_starts, "context_lens": self._context_lens, "rows": self._rows,
            "sample_rows": self._sample_rows, "temperatures": self._temperatures,
        }  # fmt: skip
        sources: dict[str, npt.NDArray[Any]] = {
            "tables": rows.tables, "last_tokens": rows.last_tokens, "seeds": rows.seeds,
            "row_temperatures": rows.temperatures, "flags": rows.flags,
        }  # fmt: skip
        return DecodeArgs(
            **{name: array.ctypes.data for name, array in (targets | sources).items()},
            width=rows.tables.shape[1],
            block_size=block_size,
            temperature_stride=rows.temperatures.strides[0] // rows.temperatures.itemsize,
        )

    def seconds(self) -> dict[str, tuple[int, float]]:
        """Calls in one pass, and seconds spent since the last time this was asked, by function."""
        totals: dict[str, tuple[int, float]] = {}
        for name, call in zip(self.names, self._calls, strict=True):
            calls, spent = totals.get(name, (0, 0.0))
            totals[name] = calls + 1, spent + call.nanoseconds / 1e9
            call.nanoseconds = 0
        return totals


def _record_head(recorder: Recorder, head: Head, chosen: Tensor) -> Tensor | None:
    """Logits of chosen hidden states; None, and nothing recorded, where the head is not a native one."""
    before = len(recorder.names), len(recorder.patches)
    try:
        logits = head(chosen)
        if logits.dtype is torch.float32:
            return logits
    except NotRecordableError as reason:
        log.info("the head is not recorded: %s", str(reason))
    recorder.drop_from(*before)
    return None


def record(ops: CpuOps, forward: Forward, head: Head, kv: Any, rows: RowArrays, **sizes: Any) -> RecordedStep | None:
    """A recorded step (see `RecordedStep` for its sizes), or None where it does something that cannot be recorded."""
    try:
        with torch.inference_mode():
            return RecordedStep(ops, forward, head, kv, rows, **sizes)
    except NotRecordableError as reason:
        log.info("the forward pass is not recorded: %s", str(reason))  # the error itself would keep the cache alive
        return None
