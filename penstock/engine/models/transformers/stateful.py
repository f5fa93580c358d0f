"""`StatefulPass`: hidden states of models of the `transformers` library whose layers keep states (`memory`).

One sequence after the other, like `SequencePass`: its state is read from the slot that the step names for it, and
written to the slot that it names for a token, wherever it names one: behind each draft token, so that rejected ones
leave no trace, and behind the last token of a chunk.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.transformers.body import Body
from penstock.engine.models.transformers.hidden import SequencePass
from penstock.engine.models.transformers.memory import Kept, Memory


class StatefulPass(SequencePass):
    """See `HiddenStates`."""

    def __init__(
        self,
        body: Body,
        memory: Memory,
        positions: bool,
        dtype: torch.dtype,
        device: torch.device,
        *,
        continues: bool,
        alone: bool,
    ) -> None:
        """`continues`: whether the model computes several tokens behind a state. `alone`: in deterministic mode, every
        token by itself."""
        super().__init__(body, memory.sites, positions, dtype, device)
        self.states = memory.states
        self._memory = memory
        self._continues = continues
        self._alone = alone

    def __call__(self, entry: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        states = batch.states
        assert states is not None, "steps of models that keep states say where"
        starts, rows, positions = (x.tolist() for x in (batch.query_starts, batch.rows, batch.positions))
        reads, writes = states.reads.tolist(), states.writes.tolist()
        parts: dict[int, Tensor] = {}
        # A decoded token and the draft tokens behind it are sequences of their own to attention, and one run here.
        begins = sorted(set(states.first.tolist()[: starts[-1]]))
        runs = zip(begins, [*begins[1:], starts[-1]], strict=True)
        # As in `SequencePass`: a sequence may begin behind blocks that another computes in the same step.
        for begin, end in sorted(runs, key=lambda run: positions[run[0]]):
            earlier, row = positions[begin], rows[bisect_right(starts, begin) - 1]
            held = self._held(earlier, batch.block_tables[row], reads[begin], kv)
            for first, last in self._pieces(begin, end, bool(earlier), writes):
                if self.before is not None:
                    self.before(first, last)
                options: dict[str, Any] = {"input_ids": entry[first:last].unsqueeze(0)}
                if self._positions:
                    options["position_ids"] = batch.positions[first:last].unsqueeze(0)
                parts[first], held = self._memory.run(held, **options)
                kept = self._memory.kept(held)
                self._keep(kept.keys_values, batch.slots[first:last], kv)
                if writes[last - 1]:
                    for tensor, into in zip(kept.states, kv.layers[len(self.sites)], strict=True):
                        into[writes[last - 1]].copy_(tensor.view(into.shape[1:]))
        return torch.cat([parts[first] for first in sorted(parts)])

    def _held(self, earlier: int, table: Tensor, slot: int, kv: KVCache) -> Any:
        """What the model has of a sequence with `earlier` tokens, whose state is in `slot`."""
        if not earlier:
            return self._memory.begin()
        states = [tensor[slot].clone() for tensor in kv.layers[len(self.sites)]]
        return self._memory.resume(Kept(self._gathered(earlier, table, kv), states))

    def _pieces(self, begin: int, end: int, continued: bool, writes: list[int]) -> list[tuple[int, int]]:
        """The passes for the tokens of a run: up to each whose state is kept."""
        pieces = []
        while begin < end:
            single = self._alone or (continued and not self._continues)
            last = begin + 1
            while last < end and not single and not writes[last - 1]:
                last += 1
            pieces.append((begin, last))
            begin, continued = last, True
        return pieces
