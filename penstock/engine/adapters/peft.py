"""Reading a PEFT checkpoint: `adapter_config.json` and `adapter_model.safetensors`, checked against the model.

Kinds other than LoRA are converted (`adapters.kinds`). What cannot be applied exactly is refused with a sentence, never
approximated. Runs on a loader thread: it touches no engine state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.adapters.adaption_prompts import AdaptionPrompts
from penstock.engine.adapters.base_tensors import BaseTensors
from penstock.engine.adapters.end_tensors import KnownMatrices
from penstock.engine.adapters.gguf_lora import adapter_file, read_gguf_lora
from penstock.engine.adapters.inputs import InputBlocks
from penstock.engine.adapters.kinds import as_lora, read_settings
from penstock.engine.adapters.kinds.modules import Tensors
from penstock.engine.adapters.layout import AdapterCut, AdapterLayout, uncut
from penstock.engine.adapters.norm_tensors import NormNames
from penstock.engine.adapters.norms import Norm
from penstock.engine.adapters.packer import Packer
from penstock.engine.adapters.peft_config import LoraConfig
from penstock.engine.adapters.prefixes import StoredPrefix
from penstock.engine.adapters.rows import EndRows
from penstock.engine.adapters.spec import CONFIG, WEIGHTS
from penstock.engine.adapters.vectors import SiteVectors
from penstock.engine.adapters.visits import VisitChanges
from penstock.errors import CheckpointError


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter in host memory. Compared by identity: a reload of the same name is another adapter."""

    name: str
    rank: int
    version: str
    """Names the content, also of the parts that other ranks keep: equal matrices give equal answers and may share
    cached prefixes; others never do."""
    data: Tensor
    """Flat, in the order of the model's `AdapterLayout`."""
    ranks: Tensor
    """int32 [sites]: the rank as stored, or 0 for sites that it touches in no layer, which are skipped."""
    further: bool = False
    """It touches linears that few adapters do; see `Site`."""
    parts: Tensor | None = None
    """int32 [sites]: a bit for each part of a site that it touches, of the lowest for the first; None: all of them."""
    rows: EndRows | None = None
    """What it replaces of embedding and head."""
    vectors: SiteVectors | None = None
    """What it does to single outputs of linears."""
    norms: Mapping[Norm, Tensor] | None = None
    """The norms that it replaces."""
    inputs: InputBlocks | None = None
    """What it does to the inputs of linears."""
    head_norms: Mapping[Norm, Tensor] | None = None
    """The norms of queries and keys that it replaces."""
    prefix: StoredPrefix | None = None
    """Keys and values of its virtual tokens."""
    adaption: AdaptionPrompts | None = None
    """Learned tokens that queries attend to by themselves."""
    visits: VisitChanges | None = None
    """What it does to outputs and inputs of experts and of `kv_b_proj`."""
    kind: str = "LoRA"
    """What PEFT's users call it."""
    narrow: bool = field(init=False)
    """It touches query, key and value only, as PEFT's default targets do."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "narrow", not self.ranks[1:].any())

    @property
    def virtual(self) -> int:
        """Tokens that it puts before every prompt; it does nothing else then."""
        return 0 if self.rows is None else self.rows.virtual

    @property
    def by_host(self) -> bool:
        """Whether it does what no captured step contains on any device: its steps are launched from the host."""
        return any(each is not None for each in (self.rows, self.inputs, self.head_norms, self.adaption, self.visits))


def read_adapter(
    name: str,
    path: Path,
    layout: AdapterLayout,
    *,
    max_rank: int,
    dtype: torch.dtype,
    pin: bool,
    cut: AdapterCut | None = None,
    base: KnownMatrices | None = None,
    row_dtype: torch.dtype | None = None,
    most_rows: int | None = None,
    room: int = 0,
    stored: BaseTensors | None = None,
    norms: NormNames | None = None,
) -> LoadedAdapter:
    """Read the adapter in the folder `path` for a model of this `layout`. `pin`: into page-locked memory. `cut`: where
    `layout` is one rank's part of a model, which part it is; then numbers are checked in that part only. `base` and
    what follows: see `Packer`."""
    from safetensors import SafetensorError, safe_open  # only those who read adapters need it

    from penstock.engine.loading.checkpoint import read_json

    if not path.is_dir():
        raise CheckpointError(f"{path} is not an adapter: give a folder with {CONFIG} and {WEIGHTS}")
    whole = cut or uncut(layout)

    def packed(config: LoraConfig, tensors: Tensors, file: str) -> Packer:
        packer = Packer(
            file,
            layout,
            whole,
            config,
            max_rank=max_rank,
            dtype=dtype,
            pin=pin,
            base=base,
            row_dtype=row_dtype,
            most_rows=most_rows,
            room=room,
            stored=stored,
            norms=norms,
        )
        packer.pack(tensors)
        return packer

    in_gguf = adapter_file(path)
    if in_gguf is not None:
        config, tensors = read_gguf_lora(in_gguf, stored)
        packer = packed(config, tensors, in_gguf.name)
    else:
        raw = read_json(path / CONFIG)
        settings = read_settings(raw)
        file = path / WEIGHTS
        if not file.exists():
            pickled = (path / "adapter_model.bin").exists()
            hint = "; its weights are pickled: save them as safetensors" if pickled else ""
            raise CheckpointError(f"{path} has no {WEIGHTS}{hint}")
        try:
            with safe_open(file, framework="pt") as opened:
                config, tensors = as_lora(raw, settings, opened, whole.whole)
                packer = packed(config, tensors, file.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{WEIGHTS} is damaged or incomplete ({error}): fetch it again") from error
    ranks, parts = (each.pin_memory() if pin else each for each in (packer.ranks, packer.parts))
    rows = packer.rows.pinned() if pin and packer.rows is not None else packer.rows
    vectors = packer.vectors.pinned() if pin and packer.vectors is not None else packer.vectors
    prefix = packer.prefix.pinned() if pin and packer.prefix is not None else packer.prefix
    further = layout.touches_further(ranks) or any(
        each is not None
        for each in (rows, vectors, packer.norms, packer.inputs, packer.head_norms, packer.adaption, packer.visits)
    )
    return LoadedAdapter(
        name, packer.rank, packer.version, packer.data, ranks, further, parts, rows, vectors, packer.norms,
        packer.inputs, packer.head_norms, prefix, packer.adaption, packer.visits, config.kind,
    )  # fmt: skip


def random_adapter(
    name: str,
    layout: AdapterLayout,
    *,
    rank: int,
    dtype: torch.dtype,
    pin: bool,
    seed: int,
    modules: Collection[str] | None = None,
) -> LoadedAdapter:
    """An adapter of small noise on `modules`, or on all of the layers, for benchmarks: it costs what a trained one
    does."""
    width = layout.width(rank)
    noise = torch.randn(width * layout.unit, generator=torch.Generator().manual_seed(seed)).mul_(0.01).to(dtype)
    ranks, parts = torch.zeros(2, len(layout.sites), dtype=torch.int32)
    for index, site in enumerate(layout.sites):
        for part, module in enumerate(site.modules):
            parts[index] |= (modules is None or module in modules) << part
        if not site.end if modules is None else any(module in modules for module in site.modules):
            ranks[index] = width
    if pin:
        noise, ranks, parts = noise.pin_memory(), ranks.pin_memory(), parts.pin_memory()
    version = hashlib.blake2b(noise.view(torch.uint8).numpy().data, digest_size=16).hexdigest()
    return LoadedAdapter(name, rank, version, noise, ranks, layout.touches_further(ranks), parts)
