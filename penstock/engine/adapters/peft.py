"""Reading a PEFT LoRA checkpoint: `adapter_config.json` and `adapter_model.safetensors`, checked against the model.

What cannot be applied exactly is refused with a sentence, never approximated. Runs on a loader thread: it touches no
engine state.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.adapters.layout import AdapterCut, AdapterLayout, rows_of, uncut
from penstock.engine.adapters.spec import CONFIG, WEIGHTS
from penstock.engine.loading.keys import KeyRules
from penstock.errors import CheckpointError

_TENSOR = re.compile(r"(?:.*\.)?(?:layers|h|blocks)\.(\d+)\.([\w.]+?)\.lora_([AB])(?:\.default)?\.weight")
RULES = KeyRules(
    reader="LoRA adapters",
    reference={
        "trainable_token_indices": None,
        "use_dora": False,
        "velora_config": None,
        "alora_invocation_tokens": None,
        "use_qalora": False,
        "monteclora_config": None,
        "layer_replication": None,
        "lora_bias": False,
        "target_parameters": None,
        "arrow_config": None,
        "kasa_config": None,
        "megatron_config": None,
    },
    read={
        "peft_type", "r", "lora_alpha", "use_rslora", "init_lora_weights", "target_modules", "exclude_modules",
        "layers_to_transform",
    },
    limited={
        "bias": ("none",),
        "modules_to_save": (None, []),
        "rank_pattern": (None, {}),
        "alpha_pattern": (None, {}),
        "use_bdlora": (None, False, {}),
    },
    inert={
        "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
        "lora_dropout", "layers_pattern", "megatron_core", "loftq_config", "eva_config", "corda_config",
        "lora_ga_config", "fan_in_fan_out", "qalora_group_size", "runtime_config", "ensure_weight_tying",
    },
    strict=True,
)  # fmt: skip
"""The reference is peft's `LoraConfig`. `init_lora_weights` says how an adapter was initialized; the settings of each
way are inert."""
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initializations after which the adapter fits the base model as it was. Others change the base too, unless the adapter
was converted when saved."""


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
    narrow: bool = field(init=False)
    """It touches query, key and value only, as PEFT's default targets do."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "narrow", not self.ranks[1:].any())


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The parts of `adapter_config.json` that matter here."""

    rank: int
    scale: float
    targets: tuple[str, ...] | None = None
    """Names of modules, or the ends of their paths; None where any may be changed, or a pattern says which."""
    excluded: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    """None: any."""

    @classmethod
    def read(cls, folder: Path, max_rank: int) -> LoraConfig:
        from penstock.engine.loading.checkpoint import read_json

        raw = read_json(folder / CONFIG)
        where = CONFIG
        kind = raw.get("peft_type", "LORA")
        if kind != "LORA":
            raise CheckpointError(f"{where}: peft_type {kind!r:.80} is not supported; only LORA is")
        RULES.check(raw, where)
        start = raw.get("init_lora_weights", True)
        if not any(start is choice or (isinstance(start, str) and start == choice) for choice in _KEEPS_BASE):
            raise CheckpointError(
                f"{where}: init_lora_weights {start!r:.80} changes the base model; save it as a plain LoRA first"
            )
        rank, alpha = raw.get("r", 8), raw.get("lora_alpha", 8)
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise CheckpointError(f"{where}: r must be a positive integer, found {rank!r:.80}")
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) < 1e30:
            raise CheckpointError(f"{where}: lora_alpha must be a number, found {alpha!r:.80}")
        if rank > max_rank:
            raise CheckpointError(f"{where}: rank {rank} is above adapter_rank {max_rank}; raise adapter_rank")
        rooted = raw.get("use_rslora", False)
        if rooted not in (True, False, None):
            raise CheckpointError(f"{where}: use_rslora must be true or false, found {rooted!r:.80}")
        targets, layers = raw.get("target_modules"), raw.get("layers_to_transform")
        return cls(
            rank,
            alpha / math.sqrt(rank) if rooted else alpha / rank,
            # A pattern is not evaluated: it could take for ever, and the tensors say what it matched.
            _strings(targets, "target_modules") if isinstance(targets, list) else None,
            _strings(raw.get("exclude_modules"), "exclude_modules"),
            None if layers is None or layers == [] else _integers(layers, "layers_to_transform"),
        )

    def applies(self, module: str, layer: int) -> bool:
        """Whether the configuration lets the module with this path be changed."""
        if self.targets is not None and not _is_named(module, self.targets):
            return False
        return not _is_named(module, self.excluded) and (self.layers is None or layer in self.layers)


def _is_named(module: str, names: Collection[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _strings(value: Any, key: str) -> tuple[str, ...]:
    if value is None or isinstance(value, str):
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(f"{CONFIG}: {key} must be a list of names or a pattern, found {value!r:.80}")
    return tuple(value)


def _integers(value: Any, key: str) -> tuple[int, ...]:
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise CheckpointError(f"{CONFIG}: {key} must be one or more integers, found {value!r:.80}")
    return tuple(numbers)


def read_adapter(
    name: str,
    path: Path,
    layout: AdapterLayout,
    *,
    max_rank: int,
    dtype: torch.dtype,
    pin: bool,
    cut: AdapterCut | None = None,
) -> LoadedAdapter:
    """Read the adapter in the folder `path` for a model of this `layout`. `pin`: into page-locked memory. `cut`: where
    `layout` is one rank's part of a model, which part it is; then numbers are checked in that part only."""
    from safetensors import SafetensorError, safe_open  # only those who read adapters need it

    if not path.is_dir():
        raise CheckpointError(f"{path} is not an adapter: give a folder with {CONFIG} and {WEIGHTS}")
    config = LoraConfig.read(path, max_rank)
    file = path / WEIGHTS
    if not file.exists():
        hint = "; its weights are pickled: save them as safetensors" if (path / "adapter_model.bin").exists() else ""
        raise CheckpointError(f"{path} has no {WEIGHTS}{hint}")
    data = torch.zeros(layout.width(config.rank) * layout.unit, dtype=dtype, pin_memory=pin)
    packer = _Packer(file, layout, cut or uncut(layout), config, data)
    try:
        with safe_open(file, framework="pt") as tensors:
            ranks = packer.pack(tensors)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{WEIGHTS} is damaged or incomplete ({error}): fetch it again") from error
    return LoadedAdapter(name, config.rank, packer.version, data, ranks.pin_memory() if pin else ranks)


class _Packer:
    """Puts one file's tensors where the layout wants them."""

    def __init__(self, file: Path, layout: AdapterLayout, cut: AdapterCut, config: LoraConfig, data: Tensor) -> None:
        self.file = file
        self.layout = layout
        self.cut = cut
        self.config = config
        self.data = data
        self._content = hashlib.blake2b(f"{config.scale!r} {data.dtype}".encode(), digest_size=16)
        self._places: dict[str, tuple[int, range]] = {}
        for index, site in enumerate(cut.whole.sites):
            for part, module in enumerate(site.modules):
                self._places[module] = (index, range(part, part + 1))
            if site.fused:
                self._places[site.fused] = (index, range(len(site.modules)))

    @property
    def version(self) -> str:
        """Of what was packed; the same on every rank."""
        return self._content.hexdigest()

    def pack(self, tensors: Any) -> Tensor:
        found: dict[tuple[int, str], dict[str, str]] = {}
        layers = self.cut.whole.layers
        for key in tensors.keys():  # noqa: SIM118 - a safetensors handle is not a mapping
            match = _TENSOR.fullmatch(key)
            if match is None or match[2] not in self._places:
                modules = ", ".join(sorted(module.rpartition(".")[2] for module in self._places))
                raise CheckpointError(f"{self.file.name}: cannot apply {key!r}; adapters may change {modules}")
            if int(match[1]) >= layers:
                raise CheckpointError(f"{self.file.name}: {key!r} is beyond the model's {layers} layers")
            path = key.rpartition(".lora_")[0].removeprefix("base_model.model.")
            if not self.config.applies(path, int(match[1])):
                raise CheckpointError(
                    f"{self.file.name} changes {path}, which {CONFIG} leaves out (target_modules, exclude_modules or "
                    "layers_to_transform)"
                )
            found.setdefault((int(match[1]), match[2]), {})[match[3]] = key
        if not found:
            raise CheckpointError(f"{self.file.name} holds no LoRA matrices")
        ranks = torch.zeros(len(self.layout.sites), dtype=torch.int32)
        for (layer, module), pair in sorted(found.items()):
            if len(pair) != 2:
                missing = "B" if "A" in pair else "A"
                raise CheckpointError(f"{self.file.name}: layer {layer} {module} has no lora_{missing}")
            self._put(layer, module, *(tensors.get_tensor(pair[side]) for side in "AB"), key=pair["A"])
            ranks[self._places[module][0]] = self.layout.width(self.config.rank)
        return ranks

    def _put(self, layer: int, module: str, a: Tensor, b: Tensor, *, key: str) -> None:
        index, parts = self._places[module]
        whole, rank = self.cut.whole.sites[index], self.config.rank
        outputs = sum(whole.sizes[part] for part in parts)
        for side, tensor, shape in (("A", a, (rank, whole.inputs)), ("B", b, (outputs, rank))):
            if tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"{self.file.name}: lora_{side} of layer {layer} {module} is {tuple(tensor.shape)}; "
                    f"rank {rank} on this model needs {shape}"
                )
            self._content.update(f"{layer} {module} {side} {tensor.dtype}".encode())
            self._content.update(tensor.contiguous().view(torch.uint8).numpy().data)
        first, last = self.cut.layers
        if not first <= layer < last:
            return
        a, rows = a[:, slice(*self.cut.inputs[index])], torch.split(b, [whole.sizes[part] for part in parts])
        spans = self.cut.outputs[index]
        ups = [rows_of(row, spans[part]).float() * self.config.scale for part, row in zip(parts, rows, strict=True)]
        if not all(bool(each.to(self.data.dtype).isfinite().all()) for each in (a, *ups)):
            raise CheckpointError(
                f"{self.file.name}: {key!r} or its partner holds values that are not finite in {self.data.dtype}"
            )
        placed, width = self.layout.place(layer - first, index), self.layout.width(rank)
        site = placed.site
        begin, middle = width * placed.start, width * (placed.start + len(site.sizes) * site.inputs)
        down = self.data[begin:middle].view(len(site.sizes), width, site.inputs)
        up = self.layout.up(self.data[middle : middle + width * site.outputs], width, site.outputs)
        for part, matrix in zip(parts, ups, strict=True):
            column = sum(site.sizes[:part])
            down[part, :rank] = a
            up[:rank, column : column + site.sizes[part]] = matrix.t()


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
    """An adapter of small noise on `modules`, or on all, for benchmarks: it costs what a trained one does."""
    width = layout.width(rank)
    noise = torch.randn(width * layout.unit, generator=torch.Generator().manual_seed(seed)).mul_(0.01).to(dtype)
    ranks = torch.zeros(len(layout.sites), dtype=torch.int32)
    for index, site in enumerate(layout.sites):
        if modules is None or any(module in modules for module in site.modules):
            ranks[index] = width
    if pin:
        noise, ranks = noise.pin_memory(), ranks.pin_memory()
    version = hashlib.blake2b(noise.view(torch.uint8).numpy().data, digest_size=16).hexdigest()
    return LoadedAdapter(name, rank, version, noise, ranks)
