"""What adapters bring beside the low-rank matrices that a kernel adds, kept by slot for those who ask for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.engine.adapters.adaption_prompts import AdaptionBank
from penstock.engine.adapters.head_norms import HeadNormBank
from penstock.engine.adapters.inputs import InputBank
from penstock.engine.adapters.norms import Norms
from penstock.engine.adapters.peft import LoadedAdapter
from penstock.engine.adapters.prefixes import PrefixBank
from penstock.engine.adapters.rows import RowBank
from penstock.engine.adapters.vectors import Vectors
from penstock.engine.adapters.visits import VisitBank


@dataclass
class Banks:
    """A bank for each; None: adapters bring none of it to this model. All are told of slots and steps by the kernel."""

    rows: RowBank | None = None
    """What adapters replace of embedding and head."""
    vectors: Vectors | None = None
    """What adapters do to single outputs; `LoraKernel.add` and its like end with it."""
    norms: Norms | None = None
    """The norms that adapters replace."""
    head_norms: HeadNormBank | None = None
    """Those of queries and keys."""
    inputs: InputBank | None = None
    """What adapters do to the inputs of linears."""
    prefixes: PrefixBank | None = None
    """Keys and values that adapters put before those of prompts."""
    adaption: AdaptionBank | None = None
    """Learned tokens that queries attend to by themselves."""
    visits: VisitBank | None = None
    """What adapters do to outputs and inputs of experts and of `kv_b_proj`; those who call `add_visits` ask it too."""

    def put(self, slot: int, adapter: LoadedAdapter) -> None:
        if self.rows is not None:
            self.rows.put(slot, adapter.rows)
        if self.vectors is not None:
            self.vectors.put(slot, adapter.vectors)
        if self.norms is not None:
            self.norms.put(slot, adapter.norms)
        if self.head_norms is not None:
            self.head_norms.put(slot, adapter.head_norms)
        if self.inputs is not None:
            self.inputs.put(slot, adapter.inputs)
        if self.prefixes is not None:
            self.prefixes.put(slot, adapter.prefix)
        if self.adaption is not None:
            self.adaption.put(slot, adapter.adaption)
        if self.visits is not None:
            self.visits.put(slot, adapter.visits)

    def begin(self, slots: np.ndarray) -> None:
        """The adapter slot of every token of the coming step; -1 where there is none."""
        for bank in (self.rows, self.vectors, self.norms, self.head_norms, self.inputs, self.prefixes, self.adaption):
            if bank is not None:
                bank.begin(slots)
        if self.visits is not None:
            self.visits.begin()

    def begin_head(self, slots: np.ndarray) -> None:
        """The same of every row of logits that comes next; behind `begin`, which forgets those of the step before."""
        for bank in (self.rows, self.vectors):
            if bank is not None:
                bank.begin_head(slots)

    def clear(self) -> None:
        """Nothing of the coming step is changed, but for what its kernels look up themselves."""
        banks = self.rows, self.vectors, self.norms, self.head_norms, self.inputs, self.prefixes, self.adaption
        for bank in (*banks, self.visits):
            if bank is not None:
                bank.clear()
